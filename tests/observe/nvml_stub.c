/* A stand-in for libnvidia-ml.so.1: two cards with invented figures, so that NVIDIA's own bindings run without a driver.
 * The scene is set by environment variables: STUB_COUNT, STUB_OLD, STUB_MIG, STUB_BROKEN. STUB_STATE names a file that is read at every
 * call and may change meanwhile: lines of "<card> <used MiB> <pid>:<MiB> ...", where ? for the MiB of a process is not told.
 * Layouts and return codes: NVML API reference (nvmlMemory_t, nvmlMemory_v2_t, nvmlProcessInfo_t). */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } process_info;

static const unsigned long long GIB = 1ULL << 30, MIB = 1ULL << 20, UNKNOWN = ~0ULL;
static int cards[2] = {0, 1};

static int state(int card, unsigned long long *used, process_info *held) {
    const char *path = getenv("STUB_STATE");
    char line[512], *word, *rest;
    int count = 0;
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file == NULL) return -1;
    *used = 0;
    while (fgets(line, sizeof line, file)) {
        if (atoi(strtok_r(line, " \n", &rest)) != card) continue;
        word = strtok_r(NULL, " \n", &rest);
        *used = word ? strtoull(word, NULL, 10) * MIB : 0;
        while ((word = strtok_r(NULL, " \n", &rest)) != NULL && count < 8) {
            char *colon = strchr(word, ':');
            process_info one = {(unsigned int)atoi(word), UNKNOWN, 0, 0};
            if (colon && colon[1] != '?') one.used = strtoull(colon + 1, NULL, 10) * MIB;
            held[count++] = one;
        }
    }
    fclose(file);
    return count;
}

static int scene(const char *name) { return getenv(name) != NULL; }

int nvmlInitWithFlags(unsigned int flags) { (void)flags; return scene("STUB_BROKEN") ? DRIVER_NOT_LOADED : SUCCESS; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    if (code == DRIVER_NOT_LOADED) return "Driver Not Loaded";
    if (code == INVALID_ARGUMENT) return "Invalid Argument";
    return "Not Supported";
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    const char *text = getenv("STUB_COUNT");
    *count = text ? (unsigned int)atoi(text) : 2;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    if (index > 1) return INVALID_ARGUMENT;
    *handle = &cards[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned int length) { snprintf(text, length, "GPU-stub-%d", *(int *)handle); return SUCCESS; }
int nvmlDeviceGetName(void *handle, char *text, unsigned int length) { snprintf(text, length, "Stub Card %d", *(int *)handle); return SUCCESS; }

int nvmlDeviceGetMemoryInfo(void *handle, memory_v1 *memory) {
    (void)handle;
    memory->total = 80 * GIB;
    memory->used = 60 * GIB + 600 * MIB;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *memory) {
    process_info scratch[8];
    if (scene("STUB_OLD")) return NOT_SUPPORTED;
    if (memory->version != (sizeof(memory_v2) | (2U << 24))) return INVALID_ARGUMENT;
    memory->total = 80 * GIB;
    memory->reserved = 600 * MIB;
    memory->used = 60 * GIB;
    state(*(int *)handle, &memory->used, scratch);
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

static int give(const process_info *from, unsigned int have, unsigned int *count, process_info *to) {
    unsigned int room = *count;
    if (scene("STUB_MIG")) return NOT_SUPPORTED;
    *count = have;
    if (have == 0) return SUCCESS;
    if (to == NULL || room < have) return INSUFFICIENT_SIZE;
    memcpy(to, from, have * sizeof(process_info));
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, process_info *processes) {
    unsigned long long used;
    process_info told[8];
    int number = state(*(int *)handle, &used, told);
    if (number >= 0) return give(told, (unsigned int)number, count, processes);
    const process_info held[] = {{101, 50 * GIB, 0, 0}, {102, 1 * GIB, 0, 0}, {103, UNKNOWN, 0, 0}};
    return give(held, *(int *)handle == 0 ? 3 : 0, count, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned int *count, process_info *processes) {
    const process_info held[] = {{101, 50 * GIB, 0, 0}};
    if (getenv("STUB_STATE")) return give(held, 0, count, processes);
    return give(held, *(int *)handle == 0 ? 1 : 0, count, processes);
}
