#include "scenario.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static Script scripts[MAX_GPUS];
static Span library[MAX_SPANS], opening[MAX_SPANS];
static unsigned library_spans, opening_spans;
static int counter_numbers;
static double period_s;
static long long origin_ns;
static struct timespec modified;
static int parsed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

unsigned gpu_count(void) {
    const char *text = getenv("NVML_STAND_IN_GPUS");
    unsigned count = text ? (unsigned)atoi(text) : 8;
    return count > MAX_GPUS ? MAX_GPUS : count;
}

static double seconds(struct timespec t) { return (double)t.tv_sec + (double)t.tv_nsec * 1e-9; }

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return seconds(t);
}

static void forget(void) {
    memset(scripts, 0, sizeof scripts);
    library_spans = 0, opening_spans = 0, counter_numbers = COUNTERS_269, period_s = 0, origin_ns = 0;
    for (unsigned i = 0; i < MAX_GPUS; i++)
        scripts[i].used_mib = 4, scripts[i].pcie_generation = 4, scripts[i].pcie_width = 16;
}

static int numbers_named(const char *word) {
    return !strcmp(word, "269")         ? COUNTERS_269
           : !strcmp(word, "251")       ? COUNTERS_251
           : !strcmp(word, "backwards") ? BACKWARDS
           : !strcmp(word, "fast")      ? FAST
           : !strcmp(word, "stuck")     ? STUCK
                                        : COUNTERS_NONE;
}

static void machine_line(const char *line) {
    char word[16];
    double a, b, c;
    sscanf(line, "origin %lld", &origin_ns);
    sscanf(line, "period %lf", &period_s);
    if (sscanf(line, "counters %15s", word) == 1) counter_numbers = numbers_named(word);
    if (sscanf(line, "init %lf %lf %lf", &a, &b, &c) == 3 && library_spans < MAX_SPANS)
        library[library_spans++] = (Span){b, c, a, 0};
    if (sscanf(line, "opening %lf %lf %lf", &a, &b, &c) == 3 && opening_spans < MAX_SPANS)
        opening[opening_spans++] = (Span){b, c, a, 0};
}

static void gpu_line(Script *s, const char *kind, const char *rest) {
    double a, b, c;
    unsigned u, v, bits;
    unsigned long long used;
#define IS(name, format, count, ...) else if (!strcmp(kind, name) && sscanf(rest, format, __VA_ARGS__) == count)
    if (0) return;
    IS("ramp", "%lf %lf %x %lf %u", 5, &a, &b, &bits, &c, &u) {
        if (s->ramps < MAX_RAMP) s->ramp[s->ramps++] = (Ramp){a, b, c, bits, u};
    }
    IS("memory", "%llu", 1, &s->used_mib) return;
    IS("process", "%u %lf %lf %lf", 4, &u, &a, &b, &c) {
        if (s->process_count < MAX_SPANS) s->processes[s->process_count++] = (Span){b, c, a, u};
    }
    IS("processes", "%u", 1, &s->crowd) return;
    IS("lost", "%lf %lf", 2, &a, &b) {
        if (s->losses < MAX_SPANS) s->lost[s->losses++] = (Span){a, b, 0, 0};
    }
    IS("slow", "%lf %lf %lf", 3, &a, &b, &c) {
        if (s->slows < MAX_SPANS) s->slow[s->slows++] = (Span){b, c, a, 0};
    }
    IS("xid", "%u %lf", 2, &u, &a) {
        if (s->xid_count < MAX_SPANS) s->xids[s->xid_count++] = (Span){a, a, u, 0};
    }
    IS("pcie", "%u %u", 2, &u, &v) s->pcie_generation = u, s->pcie_width = v;
    IS("traffic", "%lf %lf", 2, &s->pcie_bytes_per_s, &s->nvlink_kib_per_s) return;
    IS("energy", "%lf", 1, &s->energy_lost) return;
    IS("ecc", "%llu %llu %llu", 3, &s->ecc_corrected, &s->ecc_uncorrected, &s->remapped) return;
    IS("no", "%63s", 1, s->unsupported[s->names < MAX_NAMES ? s->names : MAX_NAMES - 1]) {
        if (s->names < MAX_NAMES) s->names++;
    }
    IS("garbled", "%63s", 1, s->garbled[s->garbles < MAX_NAMES ? s->garbles : MAX_NAMES - 1]) {
        if (s->garbles < MAX_NAMES) s->garbles++;
    }
    IS("instance", "%u %u %llu", 3, &u, &v, &used) {
        if (s->part_count < MAX_INSTANCES) s->parts[s->part_count++] = (Part){u, v, used};
        s->mig = 1;
    }
    else if (!strcmp(kind, "mig")) s->mig = 1;
    else if (!strcmp(kind, "unified")) s->unified = 1;
}

static void parse(FILE *file) {
    char line[256], kind[16], gpu[16];
    int used;
    while (fgets(line, sizeof line, file)) {
        machine_line(line);
        if (sscanf(line, "%15s %15s%n", kind, gpu, &used) != 2 || kind[0] == '#') continue;
        for (unsigned i = 0; i < MAX_GPUS; i++)
            if (gpu[0] == '*' || (unsigned)atoi(gpu) == i) gpu_line(&scripts[i], kind, line + used);
    }
}

/* Reads the file again when it has changed; called with the lock held. */
static void refresh(void) {
    const char *path = getenv("NVML_STAND_IN_SCENARIO");
    struct stat status;
    if (path && stat(path, &status) == 0) {
        int same = parsed && !memcmp(&status.st_mtim, &modified, sizeof modified);
        FILE *file = same ? NULL : fopen(path, "r");
        if (file) {
            forget();
            parse(file);
            fclose(file);
            modified = status.st_mtim;
        }
    } else if (!parsed) {
        forget();
    }
    parsed = 1;
}

static double since_origin(void) {
    if (origin_ns) return now(CLOCK_MONOTONIC) - (double)origin_ns * 1e-9;
    if (modified.tv_sec) return now(CLOCK_REALTIME) - seconds(modified);
    return now(CLOCK_MONOTONIC);
}

static double of_spans(const Span *spans, unsigned count, double at_s) {
    for (unsigned i = 0; i < count; i++)
        if (spans[i].from_s <= at_s && at_s < spans[i].to_s) return spans[i].value;
    return -1;
}

double elapsed_s(void) {
    pthread_mutex_lock(&lock);
    refresh();
    double at_s = since_origin();
    pthread_mutex_unlock(&lock);
    return at_s;
}

int counters(void) { return counter_numbers; }

int library_code(void) {
    double code = of_spans(library, library_spans, elapsed_s());
    return code < 0 ? 0 : (int)code;
}

double opening_s(void) { return fmax(0, of_spans(opening, opening_spans, elapsed_s())); }

int is_unsupported(const Script *script, const char *name) {
    for (unsigned i = 0; i < script->names; i++)
        if (!strcmp(script->unsupported[i], name)) return 1;
    return 0;
}

int put_text(const Script *script, const char *name, char *out, unsigned size, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out, size, format, arguments);
    va_end(arguments);
    for (unsigned i = 0; i < script->garbles; i++)
        if (!strcmp(script->garbled[i], name)) snprintf(out, size, "\xf8\x95\xa0\x81\xe8");
    return 0;
}

static double in_ramp(double at_s) { return period_s > 0 && at_s > 0 ? fmod(at_s, period_s) : at_s; }

State state_of(unsigned index) {
    State s = {.temperature_c = 40 + index, .power_w = 80, .reasons = 1, .sm_mhz = 345, .script = &scripts[index]};
    s.elapsed_s = elapsed_s();
    double at_s = in_ramp(s.elapsed_s);
    for (unsigned i = 0; i < s.script->ramps; i++) {
        const Ramp *line = &s.script->ramp[i];
        if (line->at_s <= at_s) {
            s.temperature_c = line->temperature_c, s.power_w = line->power_w;
            s.reasons = line->reasons, s.sm_mhz = line->sm_mhz;
        } else {
            if (i) s.temperature_c += (line->temperature_c - line[-1].temperature_c) * (at_s - line[-1].at_s)
                                      / (line->at_s - line[-1].at_s);
            break;
        }
    }
    s.lost = of_spans(s.script->lost, s.script->losses, s.elapsed_s) >= 0;
    s.call_s = fmax(0, of_spans(s.script->slow, s.script->slows, s.elapsed_s));
    return s;
}

static unsigned long long ns_between(double from_s, double to_s) {
    return to_s > from_s ? (unsigned long long)((to_s - from_s) * 1e9) : 0;
}

/* The integral from 0 to `to_s`, within one period: of the nanoseconds with `bits` set, or with bits 0 of the power in
 * nJ. Summed in whole numbers, line by line: rounding must not let a counter step back at the end of a period. */
static unsigned long long integral(const Script *script, unsigned bits, double to_s) {
    unsigned long long sum = 0;
    double first_s = script->ramps ? script->ramp[0].at_s : to_s;
    if (!bits) sum = (unsigned long long)(80 * (double)ns_between(0, fmin(first_s, to_s)));
    for (unsigned i = 0; i < script->ramps; i++) {
        const Ramp *line = &script->ramp[i];
        double until_s = i + 1 < script->ramps ? fmin(line[1].at_s, to_s) : to_s;
        unsigned long long ns = ns_between(fmax(0, line->at_s), until_s);
        sum += bits ? (line->reasons & bits ? ns : 0) : (unsigned long long)(line->power_w * (double)ns);
    }
    return sum;
}

static unsigned long long whole_integral(const State *state, unsigned bits) {
    double at_s = fmax(0, state->elapsed_s), in_s = in_ramp(at_s);
    unsigned long long laps = period_s > 0 ? (unsigned long long)llround((at_s - in_s) / period_s) : 0;
    return laps * integral(state->script, bits, period_s) + integral(state->script, bits, in_s);
}

unsigned long long held_ns(const State *state, unsigned bits) {
    return 5000000000ull + whole_integral(state, bits);
}

double energy_j(const State *state) { return 5000 + (1 - state->script->energy_lost) * (double)whole_integral(state, 0) / 1e9; }
