/* A stand-in libnvidia-ml.so.1 for whole processes that find it through LD_LIBRARY_PATH; scenario.h says what its
 * GPUs can be made to do.
 *
 * Links: GPUs 0-3, 4-7, ... are islands, on one NUMA node each; every pair within one is joined by four
 * NVLinks, what crosses goes over the system. */
#include "scenario.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15 };
#define MIB (1024ull * 1024ull)
#define TOTAL_MIB 81920ull
#define RESERVED_MIB 512ull
#define INSTANCE_MIB 9728ull

typedef struct { unsigned index, part; } Gpu; /* `part` is 0 for a whole GPU, n for its n-th MIG instance */
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned value_type, status;
    union { unsigned ui; unsigned long long ull; } value;
} Field;

static Gpu gpus[MAX_GPUS], instances[MAX_GPUS][MAX_INSTANCES];

static void wait_s(double s) {
    struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
    if (s > 0) nanosleep(&t, NULL);
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    for (unsigned i = 0; i < MAX_GPUS; i++) {
        gpus[i].index = i;
        for (unsigned p = 0; p < MAX_INSTANCES; p++) instances[i][p] = (Gpu){i, p + 1};
    }
    wait_s(opening_s());
    return library_code();
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "stand-in error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    return put_text(state_of(0).script, __func__, text, size, "580.82.07");
}
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { snprintf(text, size, "13.580.82.07"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpu_count(); return library_code(); }

/* What the driver answers for the handle of a MIG instance. */
static int answers_of_a_part(const char *name) {
    static const char *known[] = {"nvmlDeviceGetName", "nvmlDeviceGetUUID",
                                  "nvmlDeviceGetMemoryInfo_v2",
                                  "nvmlDeviceGetComputeRunningProcesses_v3",
                                  "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"};
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i])) return 1;
    return 0;
}

/* What GPU `d` does now, or the code with which the call named `name` fails. */
static int look(Gpu *d, const char *name, State *s) {
    int code = library_code();
    if (code) return code;
    *s = state_of(d->index);
    if (d->part && !answers_of_a_part(name)) return NOT_SUPPORTED;
    return s->lost ? GPU_IS_LOST : is_unsupported(s->script, name) ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **device) {
    State s;
    if (index >= gpu_count()) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return look(*device, __func__, &s);
}

/* A function of one GPU with its state in `s`; a lost GPU answers nothing. */
#define GPU_CALL(name, arguments, ...) \
    int name arguments { State s; int code = look(d, #name, &s); if (code) return code; __VA_ARGS__; return OK; }

GPU_CALL(nvmlDeviceGetIndex, (Gpu *d, unsigned *out), *out = d->index)
GPU_CALL(nvmlDeviceGetCudaComputeCapability, (Gpu *d, int *major, int *minor), *major = 8; *minor = 0)
GPU_CALL(nvmlDeviceGetName, (Gpu *d, char *out, unsigned size),
         return put_text(s.script, __func__, out, size, "NVIDIA Stand-In 80GB%s", d->part ? " MIG 1g.10gb" : ""))
GPU_CALL(nvmlDeviceGetUUID, (Gpu *d, char *out, unsigned size),
         return put_text(s.script, __func__, out, size, "%s-00000000-0000-0000-%04u-%012u", d->part ? "MIG" : "GPU",
                         d->part, d->index))
GPU_CALL(nvmlDeviceGetMaxMigDeviceCount, (Gpu *d, unsigned *out), *out = s.script->mig ? MAX_INSTANCES : 0)
GPU_CALL(nvmlDeviceGetMigDeviceHandleByIndex, (Gpu *d, unsigned place, Gpu **out),
         if (place >= s.script->part_count) return NOT_FOUND; *out = &instances[d->index][place])
GPU_CALL(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (Gpu *d, Gpu **out), *out = &gpus[d->index])
GPU_CALL(nvmlDeviceGetTemperature, (Gpu *d, unsigned sensor, unsigned *out), (void)sensor;
         wait_s(s.call_s); *out = (unsigned)s.temperature_c)
GPU_CALL(nvmlDeviceGetTemperatureThreshold, (Gpu *d, unsigned which, unsigned *out),
         if (which > 3 || s.script->unified) return NOT_SUPPORTED;
         *out = (const unsigned[]){95, 92, 95, 87}[which])
GPU_CALL(nvmlDeviceGetPowerUsage, (Gpu *d, unsigned *out), *out = (unsigned)(s.power_w * 1000))
GPU_CALL(nvmlDeviceGetEnforcedPowerLimit, (Gpu *d, unsigned *out), *out = 400000)
GPU_CALL(nvmlDeviceGetTotalEnergyConsumption, (Gpu *d, unsigned long long *out),
         *out = (unsigned long long)(energy_j(&s) * 1e3))
GPU_CALL(nvmlDeviceGetFanSpeed, (Gpu *d, unsigned *out), *out = 0; return NOT_SUPPORTED) /* passively cooled */
GPU_CALL(nvmlDeviceGetClockInfo, (Gpu *d, unsigned which, unsigned *out), *out = which == 2 ? 1593 : s.sm_mhz)
GPU_CALL(nvmlDeviceGetMaxClockInfo, (Gpu *d, unsigned which, unsigned *out), *out = which == 2 ? 1593 : 1980)
GPU_CALL(nvmlDeviceGetCurrentClocksEventReasons, (Gpu *d, unsigned long long *out), *out = s.reasons)
GPU_CALL(nvmlDeviceGetSupportedClocksEventReasons, (Gpu *d, unsigned long long *out), *out = 0x1FF)
GPU_CALL(nvmlDeviceGetCurrPcieLinkGeneration, (Gpu *d, unsigned *out), *out = s.script->pcie_generation)
GPU_CALL(nvmlDeviceGetMaxPcieLinkGeneration, (Gpu *d, unsigned *out), *out = 4)
GPU_CALL(nvmlDeviceGetCurrPcieLinkWidth, (Gpu *d, unsigned *out), *out = s.script->pcie_width)
GPU_CALL(nvmlDeviceGetMaxPcieLinkWidth, (Gpu *d, unsigned *out), *out = 16)
GPU_CALL(nvmlDeviceGetMigMode, (Gpu *d, unsigned *current, unsigned *pending), *current = *pending = s.script->mig)
GPU_CALL(nvmlDeviceGetUtilizationRates, (Gpu *d, unsigned *out), if (s.script->mig) return NOT_SUPPORTED;
         out[0] = s.reasons & 1 ? 0 : 97; out[1] = out[0] / 2)

static unsigned list_processes(const State *s, Process *out, unsigned room) {
    unsigned count = 0;
    for (unsigned i = 0; i < s->script->process_count; i++) {
        const Span *p = &s->script->processes[i];
        if (p->from_s > s->elapsed_s || s->elapsed_s >= p->to_s) continue;
        if (count < room) out[count] = (Process){p->pid, (unsigned long long)p->value * MIB, ~0u, ~0u};
        count++;
    }
    for (unsigned i = 0; i < s->script->crowd; i++, count++)
        if (count < room) out[count] = (Process){100000 + i, MIB, ~0u, ~0u};
    return count;
}

static unsigned long long used_mib(const State *s) {
    static Process found[MAX_SPANS + MAX_PROCESSES];
    unsigned long long mib = s->script->used_mib;
    unsigned room = MAX_SPANS + MAX_PROCESSES, count = list_processes(s, found, room);
    for (unsigned i = 0; i < count && i < room; i++) mib += found[i].used / MIB;
    return mib < TOTAL_MIB - RESERVED_MIB ? mib : TOTAL_MIB - RESERVED_MIB;
}

GPU_CALL(nvmlDeviceGetMemoryInfo, (Gpu *d, unsigned long long *out), if (s.script->unified) return NOT_SUPPORTED;
         out[0] = TOTAL_MIB * MIB; out[2] = (used_mib(&s) + RESERVED_MIB) * MIB; out[1] = out[0] - out[2])

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
GPU_CALL(nvmlDeviceGetMemoryInfo_v2, (Gpu *d, MemoryV2 *out), if (s.script->unified) return NOT_SUPPORTED;
         if (d->part) {
             unsigned long long used = s.script->parts[d->part - 1].used_mib * MIB;
             *out = (MemoryV2){out->version, INSTANCE_MIB * MIB, 0, INSTANCE_MIB * MIB - used, used};
             return OK;
         }
         out->total = TOTAL_MIB * MIB; out->reserved = RESERVED_MIB * MIB; out->used = used_mib(&s) * MIB;
         out->free = out->total - out->reserved - out->used)

GPU_CALL(nvmlDeviceGetComputeRunningProcesses_v3, (Gpu *d, unsigned *count, Process *out),
         unsigned room = out ? *count : 0; *count = list_processes(&s, out, room);
         if (room < *count) return INSUFFICIENT_SIZE)

/* What other monitors ask for, so that they can be measured beside ours. */
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
GPU_CALL(nvmlDeviceGetEncoderUtilization, (Gpu *d, unsigned *out, unsigned *period_us), *out = 0; *period_us = 167000)
GPU_CALL(nvmlDeviceGetDecoderUtilization, (Gpu *d, unsigned *out, unsigned *period_us), *out = 0; *period_us = 167000)
GPU_CALL(nvmlDeviceGetPowerManagementLimit, (Gpu *d, unsigned *out), *out = 400000)
GPU_CALL(nvmlDeviceGetPersistenceMode, (Gpu *d, unsigned *out), *out = 1)
GPU_CALL(nvmlDeviceGetPerformanceState, (Gpu *d, unsigned *out), *out = 0)
GPU_CALL(nvmlDeviceGetDisplayActive, (Gpu *d, unsigned *out), *out = 0)
GPU_CALL(nvmlDeviceGetComputeMode, (Gpu *d, unsigned *out), *out = 0)
GPU_CALL(nvmlDeviceGetTotalEccErrors, (Gpu *d, unsigned kind, unsigned counter, unsigned long long *out), (void)counter;
         *out = kind ? s.script->ecc_uncorrected : s.script->ecc_corrected)
int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *d, unsigned *count, Process *out) {
    (void)d, (void)out, *count = 0;
    return OK;
}

enum { SW_POWER = 0x4, SYNC_BOOST = 0x10, SW_THERMAL = 0x20, HW_THERMAL = 0x40, POWER_BRAKE = 0x80 };

/* A duration counter of these bits, or what stands in its place. */
static unsigned long long duration(const State *s, unsigned bits) {
    unsigned long long elapsed_ns = (unsigned long long)(s->elapsed_s * 1e9);
    switch (counters()) {
    case BACKWARDS: return 1000000000000000ull - elapsed_ns;
    case FAST: return elapsed_ns * 5;
    case STUCK: return 7;
    default: return held_ns(s, bits);
    }
}

static int put_ui(Field *f, unsigned long long value) { f->value_type = 1, f->value.ui = (unsigned)value; return OK; }
static int put_ull(Field *f, unsigned long long value) { f->value_type = 3, f->value.ull = value; return OK; }

static int answer_field(const State *s, Field *f) {
    static const unsigned policy[] = {SW_POWER, SW_THERMAL | HW_THERMAL, SYNC_BOOST};
    static const unsigned cause[] = {SW_THERMAL, HW_THERMAL, POWER_BRAKE};
    unsigned number = f->field, first = counters() == COUNTERS_251 ? 251 : 269;
    char name[24];
    snprintf(name, sizeof name, "field:%u", number);
    if (is_unsupported(s->script, name)) return NOT_SUPPORTED;
    if (number >= 74 && number <= 76) return put_ull(f, duration(s, policy[number - 74]));
    if (counters() != COUNTERS_NONE && number >= first && number <= first + 2)
        return put_ull(f, duration(s, cause[number - first]));
    if (number >= 251 && number <= 253) return put_ui(f, number != 252); /* power smoothing: enabled, level, ramp */
    switch (number) {
    case 3: return s->script->unified ? NOT_SUPPORTED : put_ull(f, s->script->ecc_corrected);
    case 4: return s->script->unified ? NOT_SUPPORTED : put_ull(f, s->script->ecc_uncorrected);
    case 82: return s->script->unified ? NOT_SUPPORTED : put_ui(f, (unsigned)s->temperature_c + 8);
    case 83: return put_ull(f, (unsigned long long)(energy_j(s) * 1e3));
    case 138: case 139: return f->scope == ~0u ? put_ull(f, (unsigned long long)(s->script->nvlink_kib_per_s
                                                                                 * s->elapsed_s)) : INVALID_ARGUMENT;
    case 142: return put_ui(f, s->script->remapped);
    case 143: case 144: case 145: return put_ui(f, 0);
    case 185: case 186: return put_ui(f, (unsigned)(s->power_w * 1000));
    case 197: case 198: return put_ui(f, (unsigned long long)(s->script->pcie_bytes_per_s * s->elapsed_s) & 0xFFFFFFFF);
    default: return NOT_SUPPORTED;
    }
}

GPU_CALL(nvmlDeviceGetFieldValues, (Gpu *d, int count, Field *out),
         for (int i = 0; i < count; i++) out[i].status = (unsigned)answer_field(&s, &out[i]))

/* Xid events: one set, which remembers up to when it has told them. */
typedef struct { Gpu *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } EventData;
static double told_s[MAX_GPUS];
static int registered[MAX_GPUS];
int nvmlEventSetCreate(int **set) { static int only; *set = &only; return OK; }
int nvmlEventSetFree(int *set) { (void)set; memset(registered, 0, sizeof registered); return OK; }
GPU_CALL(nvmlDeviceRegisterEvents, (Gpu *d, unsigned long long types, int *set), (void)set;
         if (types != 8) return NOT_SUPPORTED; if (!registered[d->index]) told_s[d->index] = s.elapsed_s;
         registered[d->index] = 1)
int nvmlEventSetWait_v2(int *set, EventData *out, unsigned timeout_ms) {
    (void)set;
    for (double left_s = timeout_ms / 1e3, slice_s;; wait_s(slice_s), left_s -= slice_s) {
        int is_scripted = 0;
        for (unsigned i = 0; i < gpu_count(); i++) {
            State s = state_of(i);
            double before_s = told_s[i];
            if (!registered[i]) continue;
            told_s[i] = s.elapsed_s;
            is_scripted |= s.script->xid_count > 0;
            for (unsigned x = 0; x < s.script->xid_count; x++)
                if (before_s < s.script->xids[x].from_s && s.script->xids[x].from_s <= s.elapsed_s) {
                    *out = (EventData){&gpus[i], 8, (unsigned long long)s.script->xids[x].value, ~0u, ~0u};
                    return OK;
                }
        }
        if (left_s <= 0) return TIMEOUT;
        /* With nothing to come it sleeps to the end, as the driver does. */
        slice_s = is_scripted && left_s > 0.02 ? 0.02 : left_s;
    }
}
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
