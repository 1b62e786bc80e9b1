// What a card runs, launch by launch, inside graphs too: a library that the CUDA driver loads into any program, and that
// writes a line for every kernel, copy, graph and call it is asked for. harness/gpu/trace.py sums them up.
//
//   gcc -O1 -shared -fPIC -I$CUDA/include -I$CUDA/extras/CUPTI/include harness/gpu/trace.c -o libtrace.so
//       -L$CUDA/extras/CUPTI/lib64 -lcupti
//   CUDA_INJECTION64_PATH=$PWD/libtrace.so TRACE_OUT=trace.txt hearth bench ... ; python3 harness/gpu/trace.py trace.txt
//
// TRACE_GRAPH=1: whole graphs instead of kernels and copies, which costs the program nothing. Tracing kernels delays the first of a
// graph by 1 to 2 us for each of them; between kernels times are sound.  TRACE_API=1: calls of the driver as well.
// Lines: kind, correlation, begin ns, end ns, name, grid x and y (or bytes), threads, dynamic shared memory.
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

static FILE* out;

static void line(char kind, unsigned id, unsigned long long begin, unsigned long long end, const char* name, unsigned long long x, unsigned y,
                 unsigned threads, unsigned shared) {
    fprintf(out, "%c %u %llu %llu %s %llu %u %u %u\n", kind, id, begin, end, name, x, y, threads, shared);
}

static void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* records) {
    *size = 8 << 20;
    *buffer = aligned_alloc(8, *size);
    *records = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid) {
    CUpti_Activity* record = NULL;
    char name[32];
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const CUpti_ActivityKernel10* k = (CUpti_ActivityKernel10*)record;
            line('K', k->correlationId, k->start, k->end, k->name, k->gridX, k->gridY, k->blockX, k->dynamicSharedMemory);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const CUpti_ActivityMemcpy6* c = (CUpti_ActivityMemcpy6*)record;
            snprintf(name, sizeof name, "copy%d", c->copyKind);
            line('M', c->correlationId, c->start, c->end, name, c->bytes, 0, 0, 0);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_GRAPH_TRACE) {
            const CUpti_ActivityGraphTrace2* g = (CUpti_ActivityGraphTrace2*)record;
            snprintf(name, sizeof name, "graph%u", g->graphId);
            line('G', g->correlationId, g->start, g->end, name, 0, 0, 0, 0);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_DRIVER) {
            const CUpti_ActivityAPI* a = (CUpti_ActivityAPI*)record;
            snprintf(name, sizeof name, "api%u", a->cbid);
            line('D', a->correlationId, a->start, a->end, name, 0, 0, 0, 0);
        }
    }
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(1);
    fclose(out);
}

int InitializeInjection(void) {
    const char* path = getenv("TRACE_OUT");
    out = fopen(path ? path : "trace.txt", "w");
    if (!out) {
        perror("TRACE_OUT");
        return 0;
    }
    cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    CUptiResult done;
    if (getenv("TRACE_GRAPH")) {
        done = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_GRAPH_TRACE);
    } else {
        done = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
        if (done == CUPTI_SUCCESS) done = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
    }
    if (done == CUPTI_SUCCESS && getenv("TRACE_API")) done = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_DRIVER);
    if (done != CUPTI_SUCCESS) fprintf(stderr, "trace: CUPTI refuses, %d\n", done);
    atexit(finish);
    return 1;
}
