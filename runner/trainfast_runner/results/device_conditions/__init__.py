"""The devices' conditions over time, joined to the steps: throttled time, clocks, energy, temperature and outages."""
