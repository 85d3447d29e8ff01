"""NVML's readings of every GPU and the kernel's of the host, taken once a period in one thread (`sampler.Sampler`)."""
