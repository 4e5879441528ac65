/* Counts what malloc and its kin are asked for, on all threads, between count_begin and count_end. Preload it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

static atomic_int counting;
static atomic_long calls, bytes;

static void note(size_t size) {
    if (!atomic_load_explicit(&counting, memory_order_relaxed)) return;
    atomic_fetch_add(&calls, 1);
    atomic_fetch_add(&bytes, (long)size);
}

void count_begin(void) {
    atomic_store(&calls, 0);
    atomic_store(&bytes, 0);
    atomic_store(&counting, 1);
}

void count_end(long *result) {
    atomic_store(&counting, 0);
    result[0] = atomic_load(&calls);
    result[1] = atomic_load(&bytes);
}

void *malloc(size_t size) {
    note(size);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    note(count * size);
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size) {
    note(size);
    return __libc_realloc(old, size);
}

void *memalign(size_t alignment, size_t size) {
    note(size);
    return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *found = memalign(alignment, size);
    if (!found) return ENOMEM;
    *result = found;
    return 0;
}

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    note(size);
    return (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}
