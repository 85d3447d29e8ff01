/* A stand-in libnvidia-ml.so.1 for whole processes that find it through LD_LIBRARY_PATH.
 *
 * NVML_STAND_IN_GPUS      number of GPUs, default 8
 * NVML_STAND_IN_SCENARIO  a text file, read again on every call; its times are seconds since it was last modified.
 *   ramp GPU AT_S TEMPERATURE_C REASONS_HEX POWER_W SM_MHZ   temperature between two lines is interpolated,
 *                                                            the rest holds from its line on
 *   memory GPU USED_MIB                                      beside what the processes use
 *   lost GPU FROM_S TO_S                                     the GPU does not answer
 *   process GPU PID USED_MIB FROM_S TO_S                     a compute process
 * GPU is an index or * for all.
 *
 * Links: GPUs 0-3, 4-7, ... are islands, on one NUMA node of 32 CPUs each; every pair within one is joined by four
 * NVLinks, what crosses goes over the system. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
#define MIB (1024ull * 1024ull)
#define TOTAL_MIB 81920ull
#define RESERVED_MIB 512ull

typedef struct { unsigned index; } Gpu;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct {
    double elapsed_s, temperature_c, power_w;
    unsigned reasons, sm_mhz, process_count;
    unsigned long long used_mib;
    int lost;
    Process processes[16];
} State;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned value_type, status;
    union { unsigned ui; unsigned long long ull; } value;
} Field;

static Gpu gpus[64];

static unsigned gpu_count(void) {
    const char *text = getenv("NVML_STAND_IN_GPUS");
    unsigned count = text ? (unsigned)atoi(text) : 8;
    return count > 64 ? 64 : count;
}

static double seconds(struct timespec t) { return (double)t.tv_sec + (double)t.tv_nsec * 1e-9; }

static void read_line(const char *line, unsigned index, State *s, double *ramp_at, double *ramp_c, int *past) {
    char kind[16], gpu[8];
    double a, b, c;
    unsigned u, bits, mhz;
    unsigned long long mib;
    if (sscanf(line, "%15s %7s", kind, gpu) != 2 || kind[0] == '#') return;
    if (gpu[0] != '*' && (unsigned)atoi(gpu) != index) return;
    if (!strcmp(kind, "ramp") && sscanf(line, "%*s %*s %lf %lf %x %lf %u", &a, &b, &bits, &c, &mhz) == 5 && !*past) {
        if (a <= s->elapsed_s) {
            s->temperature_c = b, s->reasons = bits, s->power_w = c, s->sm_mhz = mhz;
        } else {
            if (*ramp_at >= 0) s->temperature_c = *ramp_c + (b - *ramp_c) * (s->elapsed_s - *ramp_at) / (a - *ramp_at);
            *past = 1;
        }
        *ramp_at = a, *ramp_c = b;
    } else if (!strcmp(kind, "memory") && sscanf(line, "%*s %*s %llu", &mib) == 1) {
        s->used_mib = mib;
    } else if (!strcmp(kind, "lost") && sscanf(line, "%*s %*s %lf %lf", &a, &b) == 2) {
        s->lost |= a <= s->elapsed_s && s->elapsed_s < b;
    } else if (!strcmp(kind, "process") && sscanf(line, "%*s %*s %u %llu %lf %lf", &u, &mib, &a, &b) == 4) {
        if (a <= s->elapsed_s && s->elapsed_s < b && s->process_count < 16)
            s->processes[s->process_count++] = (Process){u, mib * MIB, 0xFFFFFFFFu, 0xFFFFFFFFu};
    }
}

/* What GPU `device` does now; GPU_IS_LOST when it does not answer. */
static int look(Gpu *device, State *s) {
    memset(s, 0, sizeof *s);
    s->temperature_c = 40 + device->index, s->power_w = 80, s->reasons = 1, s->sm_mhz = 345, s->used_mib = 4;
    const char *path = getenv("NVML_STAND_IN_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) {
        struct stat status;
        struct timespec now;
        char line[256];
        double ramp_at = -1, ramp_c = 0;
        int past = 0;
        fstat(fileno(file), &status);
        clock_gettime(CLOCK_REALTIME, &now);
        s->elapsed_s = seconds(now) - seconds(status.st_mtim);
        while (fgets(line, sizeof line, file)) read_line(line, device->index, s, &ramp_at, &ramp_c, &past);
        fclose(file);
    }
    for (unsigned i = 0; i < s->process_count; i++) s->used_mib += s->processes[i].used / MIB;
    return s->lost ? GPU_IS_LOST : OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    for (unsigned i = 0; i < 64; i++) gpus[i].index = i;
    return OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "stand-in error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.82.07"); return OK; }
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { snprintf(text, size, "13.580.82.07"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpu_count(); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **device) {
    State s;
    if (index >= gpu_count()) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return look(*device, &s);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **device) {
    unsigned index;
    if (sscanf(uuid, "GPU-00000000-0000-0000-0000-%12u", &index) != 1) return INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

/* A function of one GPU with its state in `s`; a lost GPU answers nothing. */
#define GPU_CALL(name, arguments, body) \
    int name arguments { State s; int code = look(d, &s); if (code) return code; body; return OK; }

GPU_CALL(nvmlDeviceGetIndex, (Gpu *d, unsigned *out), *out = d->index)
GPU_CALL(nvmlDeviceGetCudaComputeCapability, (Gpu *d, int *major, int *minor), *major = 8; *minor = 0)
GPU_CALL(nvmlDeviceGetName, (Gpu *d, char *out, unsigned size), snprintf(out, size, "NVIDIA Stand-In 80GB"))
GPU_CALL(nvmlDeviceGetUUID, (Gpu *d, char *out, unsigned size),
         snprintf(out, size, "GPU-00000000-0000-0000-0000-%012u", d->index))
GPU_CALL(nvmlDeviceGetTemperature, (Gpu *d, unsigned sensor, unsigned *out), (void)sensor; *out = (unsigned)s.temperature_c)
GPU_CALL(nvmlDeviceGetTemperatureThreshold, (Gpu *d, unsigned which, unsigned *out),
         if (which > 1) return NOT_SUPPORTED; *out = which ? 92 : 95)
GPU_CALL(nvmlDeviceGetPowerUsage, (Gpu *d, unsigned *out), *out = (unsigned)(s.power_w * 1000))
GPU_CALL(nvmlDeviceGetEnforcedPowerLimit, (Gpu *d, unsigned *out), *out = 400000)
GPU_CALL(nvmlDeviceGetTotalEnergyConsumption, (Gpu *d, unsigned long long *out),
         struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); *out = (unsigned long long)(seconds(t) * 250e3)) /* 250 W */
GPU_CALL(nvmlDeviceGetFanSpeed, (Gpu *d, unsigned *out), *out = 0; return NOT_SUPPORTED) /* passively cooled */
GPU_CALL(nvmlDeviceGetClockInfo, (Gpu *d, unsigned which, unsigned *out), *out = which == 2 ? 1593 : s.sm_mhz)
GPU_CALL(nvmlDeviceGetMaxClockInfo, (Gpu *d, unsigned which, unsigned *out), *out = which == 2 ? 1593 : 1980)
GPU_CALL(nvmlDeviceGetCurrentClocksEventReasons, (Gpu *d, unsigned long long *out), *out = s.reasons)
GPU_CALL(nvmlDeviceGetSupportedClocksEventReasons, (Gpu *d, unsigned long long *out), *out = 0x1FF)
GPU_CALL(nvmlDeviceGetCurrPcieLinkGeneration, (Gpu *d, unsigned *out), *out = 4)
GPU_CALL(nvmlDeviceGetMaxPcieLinkGeneration, (Gpu *d, unsigned *out), *out = 4)
GPU_CALL(nvmlDeviceGetCurrPcieLinkWidth, (Gpu *d, unsigned *out), *out = 16)
GPU_CALL(nvmlDeviceGetMaxPcieLinkWidth, (Gpu *d, unsigned *out), *out = 16)
GPU_CALL(nvmlDeviceGetUtilizationRates, (Gpu *d, unsigned *out), out[0] = s.reasons & 1 ? 0 : 97; out[1] = out[0] / 2)
GPU_CALL(nvmlDeviceGetMemoryInfo, (Gpu *d, unsigned long long *out), out[0] = TOTAL_MIB * MIB;
         out[2] = (s.used_mib + RESERVED_MIB) * MIB; out[1] = out[0] - out[2])

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
GPU_CALL(nvmlDeviceGetMemoryInfo_v2, (Gpu *d, MemoryV2 *out), out->total = TOTAL_MIB * MIB;
         out->reserved = RESERVED_MIB * MIB; out->used = s.used_mib * MIB;
         out->free = out->total - out->reserved - out->used)

GPU_CALL(nvmlDeviceGetComputeRunningProcesses_v3, (Gpu *d, unsigned *count, Process *out),
         unsigned room = out ? *count : 0; *count = s.process_count;
         if (room < s.process_count) return INSUFFICIENT_SIZE;
         if (out) memcpy(out, s.processes, s.process_count * sizeof *out))

GPU_CALL(nvmlDeviceGetFieldValues, (Gpu *d, int count, Field *out), for (int i = 0; i < count; i++) {
    out[i].status = out[i].field == 82 ? OK : NOT_SUPPORTED;
    out[i].value_type = 1;
    out[i].value.ui = (unsigned)s.temperature_c + 8;
})

enum { ISLAND = 4, LINKS_A_PAIR = 4, LINKS = LINKS_A_PAIR * (ISLAND - 1), FIRST_BUS = 0x10 };
typedef struct { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; } Pci;

static void put_bus(Pci *out, unsigned index) {
    memset(out, 0, sizeof *out);
    out->bus = FIRST_BUS + index;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
}

/* The GPU at the other end of a link: the others of the island in turn, LINKS_A_PAIR links each. */
static unsigned link_end(unsigned index, unsigned link) {
    unsigned first = index / ISLAND * ISLAND, other = first + link / LINKS_A_PAIR;
    return other >= index ? other + 1 : other;
}

GPU_CALL(nvmlDeviceGetPciInfo_v3, (Gpu *d, Pci *out), put_bus(out, d->index))
GPU_CALL(nvmlDeviceGetCpuAffinity, (Gpu *d, unsigned words, unsigned long *out),
         memset(out, 0, words * sizeof *out); unsigned node = d->index / ISLAND;
         if (node / 2 < words) out[node / 2] = 0xFFFFFFFFul << node % 2 * 32)
GPU_CALL(nvmlDeviceGetMemoryAffinity, (Gpu *d, unsigned words, unsigned long *out, unsigned scope),
         (void)scope; memset(out, 0, words * sizeof *out); out[0] = 1ul << d->index / ISLAND)
GPU_CALL(nvmlDeviceGetTopologyCommonAncestor, (Gpu *d, Gpu *other, unsigned *out),
         *out = d->index / ISLAND == other->index / ISLAND ? 40 : 50)
GPU_CALL(nvmlDeviceGetP2PStatus, (Gpu *d, Gpu *other, unsigned capability, unsigned *out),
         *out = capability == 2 && d->index / ISLAND != other->index / ISLAND ? 5 : 0)
GPU_CALL(nvmlDeviceGetNvLinkState, (Gpu *d, unsigned link, unsigned *out), if (link >= LINKS) return INVALID_ARGUMENT;
         *out = link_end(d->index, link) < gpu_count())
GPU_CALL(nvmlDeviceGetNvLinkRemoteDeviceType, (Gpu *d, unsigned link, unsigned *out),
         if (link >= LINKS) return INVALID_ARGUMENT; *out = 0)
GPU_CALL(nvmlDeviceGetNvLinkRemotePciInfo_v2, (Gpu *d, unsigned link, Pci *out),
         if (link >= LINKS) return INVALID_ARGUMENT; put_bus(out, link_end(d->index, link)))
