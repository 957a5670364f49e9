/* Preloaded into a process: counts what it does to the files below one directory, writes that down, and ends the
 * process after a given number of operations.
 *
 *     watch(root, stop_after, is_torn, log)   from now on; a negative stop_after never ends it, a negative log writes none
 *
 * With is_torn the operation after the last is begun: half of it is written, where it is a write, before the end.
 * The log is one record an operation: its kind, paths and numbers with tabs between them and a line feed, then for a
 * write the bytes themselves.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static char root[PATH_MAX];
static size_t root_length;
static long stop_after, done;
static int is_torn, log_fd = -1;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

void watch(const char *directory, long stop, int torn, int log) {
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    stop_after = stop, is_torn = torn, log_fd = log, done = 0;
}

long operations(void) { return done; }

static void end(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* The path that a call means; empty if it is not below the directory. */
static const char *place(int directory, const char *path, char *buffer) {
    char base[PATH_MAX] = "";
    if (!root_length) return "";
    if (path && path[0] == '/') snprintf(buffer, PATH_MAX, "%s", path);
    else {
        if (directory == AT_FDCWD) { if (!getcwd(base, sizeof base)) return ""; }
        else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0) return "";
            base[length] = 0;
        }
        if (path && snprintf(buffer, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return "";
        if (!path) snprintf(buffer, PATH_MAX, "%s", base);
    }
    int is_below = !strncmp(buffer, root, root_length) && (buffer[root_length] == '/' || !buffer[root_length]);
    return is_below ? buffer : "";
}

/* One operation at a time: count it, or end before it. */
static void enter(void) {
    pthread_mutex_lock(&turn);
    if (stop_after >= 0 && done >= stop_after && !is_torn) end();
    done++;
}

static int is_last(void) { return stop_after >= 0 && done > stop_after; }

static void leave(const char *format, ...) {
    if (is_last()) end();
    if (log_fd >= 0) {
        va_list arguments;
        va_start(arguments, format);
        vdprintf(log_fd, format, arguments);
        va_end(arguments);
    }
    pthread_mutex_unlock(&turn);
}

/* What failed has changed nothing, so it does not count. */
static void take_back(void) {
    done--;
    pthread_mutex_unlock(&turn);
}

static void keep(const void *content, size_t size) {
    const char *bytes = content;
    while (log_fd >= 0 && size) {
        ssize_t written = syscall(SYS_write, log_fd, bytes, size);
        if (written < 0) end();
        bytes += written, size -= written;
    }
}

#define OPEN(name, directory) \
    int mode = 0; \
    char buffer[PATH_MAX]; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, int); va_end(more); } \
    const char *at = flags & (O_CREAT | O_TRUNC) ? place(directory, path, buffer) : ""; \
    struct stat found; \
    if (!*at || (!(flags & O_TRUNC) && !stat(at, &found))) return real OPEN_ARGUMENTS; \
    enter(); \
    if (is_last()) end(); \
    int result = real OPEN_ARGUMENTS; \
    if (result >= 0) leave("create\t%s\t%d\n", at, flags & O_TRUNC ? 1 : 0); else take_back(); \
    return result

#define OPEN_ARGUMENTS (path, flags, mode)
int open(const char *path, int flags, ...) { REAL(int, "open", const char *, int, ...); OPEN("open", AT_FDCWD); }
int open64(const char *path, int flags, ...) { REAL(int, "open64", const char *, int, ...); OPEN("open64", AT_FDCWD); }
#undef OPEN_ARGUMENTS
#define OPEN_ARGUMENTS (directory, path, flags, mode)
int openat(int directory, const char *path, int flags, ...) {
    REAL(int, "openat", int, const char *, int, ...);
    OPEN("openat", directory);
}
int openat64(int directory, const char *path, int flags, ...) {
    REAL(int, "openat64", int, const char *, int, ...);
    OPEN("openat64", directory);
}

static ssize_t put(int fd, const void *content, size_t size, off64_t offset) {
    return offset < 0 ? syscall(SYS_write, fd, content, size) : syscall(SYS_pwrite64, fd, content, size, offset);
}

static ssize_t watched_write(int fd, const void *content, size_t size, off64_t offset) {
    char buffer[PATH_MAX];
    const char *at = fd == log_fd ? "" : place(fd, NULL, buffer);
    struct stat found;
    if (!*at || fstat(fd, &found) || !S_ISREG(found.st_mode)) return put(fd, content, size, offset);
    enter();
    if (is_last()) {
        put(fd, content, size / 2, offset);
        end();
    }
    off64_t start = offset >= 0 ? offset : fcntl(fd, F_GETFL) & O_APPEND ? found.st_size : lseek64(fd, 0, SEEK_CUR);
    ssize_t result = put(fd, content, size, offset);
    if (result < 0) { take_back(); return result; }
    if (log_fd >= 0) dprintf(log_fd, "write\t%s\t%lld\t%zd\n", at, (long long)start, result);
    keep(content, result);
    leave("");
    return result;
}

ssize_t write(int fd, const void *content, size_t size) { return watched_write(fd, content, size, -1); }
ssize_t pwrite(int fd, const void *content, size_t size, off_t offset) { return watched_write(fd, content, size, offset); }
ssize_t pwrite64(int fd, const void *content, size_t size, off64_t offset) { return watched_write(fd, content, size, offset); }

/* Copies within the kernel are made writes, so that they are seen. */
static ssize_t copied(int out, int in, off64_t *offset, size_t size) {
    static char content[1 << 20];
    if (size > sizeof content) size = sizeof content;
    ssize_t got = offset ? pread64(in, content, size, *offset) : read(in, content, size);
    ssize_t written = got > 0 ? watched_write(out, content, got, -1) : got;
    if (offset && written > 0) *offset += written;
    return written;
}
ssize_t sendfile(int out, int in, off_t *offset, size_t size) { return copied(out, in, (off64_t *)offset, size); }
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) { return copied(out, in, offset, size); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    (void)to, (void)flags;
    return copied(out, in, from, size);
}

/* An operation on one path or two, whole or not at all. */
#define WHOLE(kind, first, call, format, ...) \
    const char *at = first; \
    if (!*at) return call; \
    enter(); \
    if (is_last()) end(); \
    int result = call; \
    if (!result) leave(kind "\t" format "\n", __VA_ARGS__); else take_back(); \
    return result

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    char a[PATH_MAX], b[PATH_MAX];
    const char *target = place(AT_FDCWD, to, b);
    WHOLE("rename", place(AT_FDCWD, from, a), real(from, to), "%s\t%s", at, target);
}
int renameat(int old, const char *from, int new, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    char a[PATH_MAX], b[PATH_MAX];
    const char *target = place(new, to, b);
    WHOLE("rename", place(old, from, a), real(old, from, new, to), "%s\t%s", at, target);
}
int link(const char *from, const char *to) {
    REAL(int, "link", const char *, const char *);
    char a[PATH_MAX], b[PATH_MAX];
    const char *target = place(AT_FDCWD, to, b);
    WHOLE("link", place(AT_FDCWD, from, a), real(from, to), "%s\t%s", at, target);
}
int linkat(int old, const char *from, int new, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    char a[PATH_MAX], b[PATH_MAX];
    const char *target = place(new, to, b);
    WHOLE("link", place(old, from, a), real(old, from, new, to, flags), "%s\t%s", at, target);
}
int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    char a[PATH_MAX];
    WHOLE("unlink", place(AT_FDCWD, path, a), real(path), "%s", at);
}
int unlinkat(int directory, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    char a[PATH_MAX];
    WHOLE("unlink", place(directory, path, a), real(directory, path, flags), "%s", at);
}
int rmdir(const char *path) {
    REAL(int, "rmdir", const char *);
    char a[PATH_MAX];
    WHOLE("unlink", place(AT_FDCWD, path, a), real(path), "%s", at);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    char a[PATH_MAX];
    struct stat found;
    if (!stat(path, &found)) return real(path, mode);
    WHOLE("mkdir", place(AT_FDCWD, path, a), real(path, mode), "%s", at);
}
int mkdirat(int directory, const char *path, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    char a[PATH_MAX];
    WHOLE("mkdir", place(directory, path, a), real(directory, path, mode), "%s", at);
}
int truncate(const char *path, off_t size) {
    REAL(int, "truncate", const char *, off_t);
    char a[PATH_MAX];
    WHOLE("truncate", place(AT_FDCWD, path, a), real(path, size), "%s\t%lld", at, (long long)size);
}
int ftruncate64(int fd, off64_t size) {
    REAL(int, "ftruncate64", int, off64_t);
    char a[PATH_MAX];
    WHOLE("truncate", place(fd, NULL, a), real(fd, size), "%s\t%lld", at, (long long)size);
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
int fsync(int fd) {
    REAL(int, "fsync", int);
    char a[PATH_MAX];
    WHOLE("fsync", place(fd, NULL, a), real(fd), "%s", at);
}
int fdatasync(int fd) { return fsync(fd); }
