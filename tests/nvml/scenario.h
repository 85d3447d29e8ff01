/* What the stand-in GPUs do and when: the scenario file of libnvidia_ml.c, parsed once for each change of it.
 *
 * NVML_STAND_IN_GPUS      number of GPUs, default 8, at most 64
 * NVML_STAND_IN_SCENARIO  a text file, one statement a line; GPU is an index or * for all; scenario.py is its twin
 *
 *   origin MONOTONIC_NS              times are seconds since this CLOCK_MONOTONIC; default: since the file's mtime
 *   period S                         the ramp lines begin again every S seconds
 *   counters 269|251|none|backwards|fast|stuck
 *                                    where the thermal and brake counters stand (269-271 of R580, 251-253 of R575);
 *                                    with 269 the numbers 251-253 mean power smoothing, and answer with SUCCESS;
 *                                    the last three count nonsense at 269-271 and at 74-76
 *   init CODE FROM_S TO_S            nvmlInit answers this nvmlReturn_t, and so does every other call
 *   opening CALL_S FROM_S TO_S       nvmlInit takes as long
 *   ramp GPU AT_S TEMPERATURE_C REASONS_HEX POWER_W SM_MHZ   temperature between two lines is interpolated,
 *                                                            the rest holds from its line on
 *   memory GPU USED_MIB              beside what the processes use
 *   process GPU PID USED_MIB FROM_S TO_S   a compute process
 *   processes GPU COUNT              as many more compute processes, from PID 100000 on
 *   lost GPU FROM_S TO_S             the GPU does not answer
 *   slow GPU CALL_S FROM_S TO_S      every look at the temperature takes as long
 *   xid GPU CODE AT_S                an Xid event
 *   pcie GPU GENERATION WIDTH        the link as it is now; it could be 4 x16
 *   traffic GPU PCIE_BYTES_PER_S NVLINK_KIB_PER_S   each way; the PCIe counters are of 32 bits and wrap
 *   energy GPU LOST_SHARE            the energy counter counts so much less than the truth; 1: it stands still
 *   ecc GPU CORRECTED UNCORRECTED REMAPPED_ROWS
 *   no GPU NAME                      this function, or "field:82", is not supported
 *   garbled GPU NAME                 the text of this function is no UTF-8
 *   mig GPU                          MIG is on: no utilization
 *   instance GPU GI CI USED_MIB      a MIG instance of 9728 MiB with these numbers; MIG is then on
 *   unified GPU                      memory is the host's: no memory readings, no thresholds, no ECC
 *
 * The duration counters and the energy are exact integrals of the ramp, so a test can say what is true. */
#ifndef SCENARIO_H
#define SCENARIO_H

enum { MAX_INSTANCES = 7 };
enum { MAX_GPUS = 64, MAX_RAMP = 64, MAX_SPANS = 32, MAX_NAMES = 24, MAX_PROCESSES = 20000 };
enum { COUNTERS_NONE = 0, COUNTERS_251 = 251, COUNTERS_269 = 269, BACKWARDS, FAST, STUCK };

typedef struct { double at_s, temperature_c, power_w; unsigned reasons, sm_mhz; } Ramp;
typedef struct { double from_s, to_s, value; unsigned pid; } Span;
typedef struct { unsigned gpu_instance, compute_instance; unsigned long long used_mib; } Part;
typedef struct {
    Part parts[MAX_INSTANCES];
    unsigned part_count;
    Ramp ramp[MAX_RAMP];
    Span processes[MAX_SPANS], lost[MAX_SPANS], slow[MAX_SPANS], xids[MAX_SPANS];
    char unsupported[MAX_NAMES][64], garbled[MAX_NAMES][64];
    unsigned garbles, ramps, process_count, losses, slows, xid_count, names, crowd, pcie_generation, pcie_width;
    unsigned long long used_mib, ecc_corrected, ecc_uncorrected, remapped;
    double pcie_bytes_per_s, nvlink_kib_per_s, energy_lost;
    int mig, unified;
} Script;

typedef struct { /* one GPU at one moment */
    const Script *script;
    double elapsed_s, temperature_c, power_w, call_s;
    unsigned reasons, sm_mhz;
    int lost;
} State;

unsigned gpu_count(void);
State state_of(unsigned index);
/* Nanoseconds since the origin in which any of `bits` was set. */
unsigned long long held_ns(const State *state, unsigned bits);
double energy_j(const State *state);
int is_unsupported(const Script *script, const char *name);
/* Writes the text, or what is no text where the scenario says so; the driver's own is garbled with GPU 0. */
int put_text(const Script *script, const char *name, char *out, unsigned size, const char *format, ...);
int counters(void);
/* The nvmlReturn_t that the whole library answers now, 0 when it works. */
int library_code(void);
/* How long nvmlInit takes now, in seconds. */
double opening_s(void);
double elapsed_s(void);
#endif
