/* Preloaded: what a program does to files below a directory fails from some point on, as on a disk that is full or ill.
 *
 *   FAILING_ROOT     the directory
 *   FAILING_PROGRAM  a word of the command lines of the programs that are hit
 *   FAILING_CALL     write, create, mkdir, rename, link or fsync
 *   FAILING_AFTER    bytes (write) or calls that still succeed, in each program
 *   FAILING_ERRNO    the error's number
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *root, *call;
static int number;
static atomic_long left;
static int is_on;

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void)
{
    const char *program = getenv("FAILING_PROGRAM"), *after = getenv("FAILING_AFTER"), *error = getenv("FAILING_ERRNO");
    root = getenv("FAILING_ROOT");
    call = getenv("FAILING_CALL");
    if (!root || !program || !after || !error || !call)
        return;
    static char line[65536];
    int file = NEXT(open)("/proc/self/cmdline", O_RDONLY);
    ssize_t size = file < 0 ? 0 : read(file, line, sizeof line - 1);
    if (file >= 0)
        close(file);
    for (ssize_t at = 0; at < size; at++)
        if (!line[at])
            line[at] = ' ';
    number = atoi(error);
    left = atol(after);
    is_on = strstr(line, program) != NULL;
}

/* Whether so much of a call on a path still succeeds; counts it. */
static int fails(const char *name, const char *path, long amount)
{
    if (!is_on || strcmp(name, call) || strncmp(path, root, strlen(root)))
        return 0;
    if (atomic_fetch_sub(&left, amount) >= amount)
        return 0;
    atomic_store(&left, 0); /* it stays full */
    errno = number;
    return 1;
}

static int fails_on(const char *name, int file, long amount)
{
    char link[64], path[4096];
    if (!is_on || strcmp(name, call))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return fails(name, path, amount);
}

ssize_t write(int file, const void *content, size_t size)
{
    return fails_on("write", file, size) ? -1 : NEXT(write)(file, content, size);
}

ssize_t pwrite64(int file, const void *content, size_t size, off64_t at)
{
    return fails_on("write", file, size) ? -1 : NEXT(pwrite64)(file, content, size, at);
}

ssize_t writev(int file, const struct iovec *parts, int count)
{
    return fails_on("write", file, count ? parts[0].iov_len : 0) ? -1 : NEXT(writev)(file, parts, count);
}

ssize_t sendfile64(int to, int from, off64_t *at, size_t size)
{
    struct stat found;
    long amount = fstat(from, &found) ? 0 : found.st_size;
    return fails_on("write", to, amount) ? -1 : NEXT(sendfile64)(to, from, at, size);
}

ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *there, size_t size, unsigned flags)
{
    struct stat found;
    long amount = fstat(from, &found) ? 0 : found.st_size;
    return fails_on("write", to, amount) ? -1 : NEXT(copy_file_range)(from, at, to, there, size, flags);
}

#define OPENING(name)                                                          \
    int name(const char *path, int flags, ...)                                 \
    {                                                                          \
        va_list rest;                                                          \
        va_start(rest, flags);                                                 \
        mode_t mode = va_arg(rest, mode_t);                                    \
        va_end(rest);                                                          \
        if ((flags & O_CREAT) && fails("create", path, 1))                     \
            return -1;                                                         \
        return NEXT(name)(path, flags, mode);                                  \
    }
OPENING(open)
OPENING(open64)

int mkdir(const char *path, mode_t mode) { return fails("mkdir", path, 1) ? -1 : NEXT(mkdir)(path, mode); }
int rename(const char *from, const char *to) { return fails("rename", to, 1) ? -1 : NEXT(rename)(from, to); }
int link(const char *from, const char *to) { return fails("link", to, 1) ? -1 : NEXT(link)(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags)
{
    return fails("link", to, 1) ? -1 : NEXT(linkat)(a, from, b, to, flags);
}
int fsync(int file) { return fails_on("fsync", file, 1) ? -1 : NEXT(fsync)(file); }
int fdatasync(int file) { return fails_on("fsync", file, 1) ? -1 : NEXT(fdatasync)(file); }
