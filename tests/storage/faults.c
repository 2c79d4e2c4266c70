/* Lets the N-th system call of this process that touches files below a folder fail, or kills the process there.
 *
 * A seccomp filter traps calls that change or open files, also those that no C library makes; the handler looks where
 * they lead to, and makes them itself, from an address that the filter lets pass. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

enum { COUNT, FAIL, KILL };
enum { AT_PATH, PATH, TWO_AT_PATHS, TWO_PATHS, DESCRIPTOR };

static const struct { long number; int kind; const char *name; } CALLS[] = {
    {SYS_openat, AT_PATH, "open"}, {SYS_write, DESCRIPTOR, "write"}, {SYS_pwrite64, DESCRIPTOR, "write"},
    {SYS_writev, DESCRIPTOR, "write"}, {SYS_fsync, DESCRIPTOR, "sync"}, {SYS_fdatasync, DESCRIPTOR, "sync"},
    {SYS_ftruncate, DESCRIPTOR, "truncate"}, {SYS_fallocate, DESCRIPTOR, "allocate"},
    {SYS_renameat2, TWO_AT_PATHS, "rename"}, {SYS_linkat, TWO_AT_PATHS, "link"}, {SYS_unlinkat, AT_PATH, "unlink"},
    {SYS_mkdirat, AT_PATH, "mkdir"}, {SYS_fchmod, DESCRIPTOR, "chmod"}, {SYS_fchmodat, AT_PATH, "chmod"},
#ifdef SYS_renameat
    {SYS_renameat, TWO_AT_PATHS, "rename"},
#endif
#ifdef SYS_open
    {SYS_open, PATH, "open"}, {SYS_creat, PATH, "open"}, {SYS_rename, TWO_PATHS, "rename"},
    {SYS_link, TWO_PATHS, "link"}, {SYS_unlink, PATH, "unlink"}, {SYS_rmdir, PATH, "unlink"},
    {SYS_mkdir, PATH, "mkdir"}, {SYS_chmod, PATH, "chmod"},
#endif
};
enum { NUM_CALLS = sizeof CALLS / sizeof *CALLS };

static char folder[4096];
static int mode, at, error_number, log_file, count, no_exchange;

#if defined(__x86_64__)
__asm__(".globl faults_call\n.globl faults_called\nfaults_call:\n"
        "mov %rdi,%rax\nmov %rsi,%rdi\nmov %rdx,%rsi\nmov %rcx,%rdx\nmov %r8,%r10\nmov %r9,%r8\nmov 8(%rsp),%r9\n"
        "syscall\nfaults_called:\nret\n");
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
__asm__(".globl faults_call\n.globl faults_called\nfaults_call:\n"
        "mov x8,x0\nmov x0,x1\nmov x1,x2\nmov x2,x3\nmov x3,x4\nmov x4,x5\nmov x5,x6\nsvc 0\nfaults_called:\nret\n");
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "no way to make system calls on this processor"
#endif
extern long faults_call(long, long, long, long, long, long, long);
extern const char faults_called[];

/* The whole path of what a call is about; empty if it cannot be told. */
static void path_of(long descriptor, const char *name, char *path, size_t room)
{
    path[0] = 0;
    if (name && name[0] == '/') { strncpy(path, name, room - 1); path[room - 1] = 0; return; }
    char link[64];
    if (descriptor == AT_FDCWD) strcpy(link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%ld", descriptor);
    long length = faults_call(SYS_readlinkat, AT_FDCWD, (long)link, (long)path, (long)(room - 1), 0, 0);
    path[length > 0 ? length : 0] = 0;
    if (name && length > 0 && (size_t)length + strlen(name) + 2 < room) { strcat(path, "/"); strcat(path, name); }
}

static int is_below(const char *path)
{
    size_t length = strlen(folder);
    return strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* What is written by half when the process ends. */
static void tear(long number, const long *a)
{
    if (number == SYS_write || number == SYS_pwrite64) faults_call(number, a[0], a[1], a[2] / 2, a[3], 0, 0);
    if (number == SYS_writev) {
        const struct iovec *parts = (const struct iovec *)a[1];
        faults_call(SYS_write, a[0], (long)parts[0].iov_base, (long)(parts[0].iov_len / 2), 0, 0, 0);
    }
}

static long decide(long number, const long *a)
{
    char first[8192], second[8192], line[16600];
    int which = 0;
    while (which < NUM_CALLS && CALLS[which].number != number) which++;
    if (which == NUM_CALLS) return -ENOSYS;
    second[0] = 0;
    switch (CALLS[which].kind) {
    case PATH: path_of(AT_FDCWD, (const char *)a[0], first, sizeof first); break;
    case AT_PATH: path_of(a[0], (const char *)a[1], first, sizeof first); break;
    case TWO_PATHS:
        path_of(AT_FDCWD, (const char *)a[0], first, sizeof first);
        path_of(AT_FDCWD, (const char *)a[1], second, sizeof second);
        break;
    case TWO_AT_PATHS:
        path_of(a[0], (const char *)a[1], first, sizeof first);
        path_of(a[2], (const char *)a[3], second, sizeof second);
        break;
    default: path_of(a[0], NULL, first, sizeof first);
    }
    if (!is_below(first) && !is_below(second)) return faults_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (no_exchange && number == SYS_renameat2 && a[4]) return -EINVAL; /* as file systems say that cannot do it */
    int own = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    long result = -error_number;
    if (mode == KILL && own == at) {
        tear(number, a);
        faults_call(SYS_kill, getpid(), SIGKILL, 0, 0, 0, 0);
    }
    if (mode != FAIL || own != at) result = faults_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    int flags = number == SYS_openat ? (int)a[2] : 0;
#ifdef SYS_open
    if (number == SYS_open) flags = (int)a[1];
#endif
    const char *how = number == SYS_renameat2 && a[4] ? "exchange" : flags & O_CREAT ? "create" : CALLS[which].name;
    int length = snprintf(line, sizeof line, "%s\t%ld\t%s\t%s\n", how, result < 0 ? result : 0, first, second);
    faults_call(SYS_write, log_file, (long)line, length, 0, 0, 0);
    return result;
}

static void handle(int signal, siginfo_t *info, void *context)
{
    (void)signal;
#if defined(__x86_64__)
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    long a[6] = {r[REG_RDI], r[REG_RSI], r[REG_RDX], r[REG_R10], r[REG_R8], r[REG_R9]};
    r[REG_RAX] = decide(info->si_syscall, a);
#else
    unsigned long long *r = ((ucontext_t *)context)->uc_mcontext.regs;
    long a[6] = {r[0], r[1], r[2], r[3], r[4], r[5]};
    r[0] = decide(info->si_syscall, a);
#endif
}

/* Begin; there is no way back. Returns 0, or the number of an error if this kernel or container does not let us. */
int faults_begin(const char *below, int how, int which, int error, int log, int without_exchange)
{
    strncpy(folder, below, sizeof folder - 1);
    mode = how; at = which; error_number = error; log_file = log; no_exchange = without_exchange;
    struct sigaction action = {0};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    if (sigaction(SIGSYS, &action, NULL)) return errno;

    uint64_t passes = (uint64_t)(uintptr_t)faults_called;
    struct sock_filter filter[NUM_CALLS + 9];
    int n = 0;
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 0, NUM_CALLS + 1);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < NUM_CALLS; i++)
        filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, CALLS[i].number, NUM_CALLS - i, 0);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer));
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)passes, 0, 2);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer) + 4);
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(passes >> 32), 1, 0);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_filter program_filter[NUM_CALLS + 10];
    memcpy(program_filter, filter, sizeof(struct sock_filter) * n);
    program_filter[n++] = allow;
    struct sock_fprog program = {.len = n, .filter = program_filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return errno;
    return 0;
}
