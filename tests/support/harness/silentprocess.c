// SPDX-License-Identifier: Apache-2.0
// An unprivileged user's processes whose memory maps stay locked for ever.
//
// silentprocess DIRECTORY COUNT FILE DEVICE: become root of a user namespace, open the FUSE DEVICE there, mount a filesystem
// at DIRECTORY whose server never answers READ, and fork COUNT processes. In each of them one
// thread reads a file there, which locks its first page; another one maps FILE executable again
// and again; the first one maps the same inode, opened with FOPEN_DIRECT_IO. That drops the pages
// of the inode, and so waits for the locked one, with the lock of the memory map held.
// Prints the process IDs, one a line, then "silent". Ends at the end of its standard input.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST = 4096, SIZE = 1 << 16 };
static int opens[MOST + 2];
static const char *mapped;

static void check(int result, const char *what) {
    if (result < 0) { perror(what); exit(1); }
}

static void write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY);
    check(fd, path);
    check(write(fd, text, strlen(text)), path);
    close(fd);
}

static void mount_at(const char *directory, const char *node, int *device) {
    char map[64], options[128];
    uid_t uid = getuid();
    gid_t gid = getgid();
    check(unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare");
    write_text("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "0 %u 1", uid);
    write_text("/proc/self/uid_map", map);
    snprintf(map, sizeof map, "0 %u 1", gid);
    write_text("/proc/self/gid_map", map);
    *device = open(node, O_RDWR);
    check(*device, node);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", *device);
    check(mount("silent", directory, "fuse", MS_NOSUID | MS_NODEV, options), "mount");
}

static void attributes(struct fuse_attr *attr, uint64_t node) {
    attr->ino = node;
    attr->mode = node == 1 ? S_IFDIR | 0755 : S_IFREG | 0755;
    attr->nlink = 1;
    attr->size = node == 1 ? 0 : SIZE;
}

static void answer(int device, uint64_t unique, int error, void *body, size_t size) {
    struct fuse_out_header head = {sizeof head + (error ? 0 : size), -error, unique};
    struct iovec parts[2] = {{&head, sizeof head}, {body, error ? 0 : size}};
    (void)!writev(device, parts, 2);
}

static void serve_one(int device, struct fuse_in_header *in) {
    void *body = in + 1;
    struct fuse_entry_out entry = {0};
    struct fuse_attr_out attr = {0};
    struct fuse_open_out opened = {0};
    struct fuse_init_out init = {0};
    switch (in->opcode) {
    case FUSE_INIT:
        init.major = 7, init.minor = 31;
        init.max_readahead = ((struct fuse_init_in *)body)->max_readahead;
        init.max_write = 4096;
        answer(device, in->unique, 0, &init, sizeof init);
        return;
    case FUSE_LOOKUP:
        entry.nodeid = 2 + atoi(body);
        entry.attr_valid = entry.entry_valid = 3600;
        attributes(&entry.attr, entry.nodeid);
        answer(device, in->unique, 0, &entry, sizeof entry);
        return;
    case FUSE_GETATTR:
        attr.attr_valid = 3600;
        attributes(&attr.attr, in->nodeid);
        answer(device, in->unique, 0, &attr, sizeof attr);
        return;
    case FUSE_OPEN:
        opened.open_flags = FOPEN_KEEP_CACHE;
        if (opens[in->nodeid]++) opened.open_flags |= FOPEN_DIRECT_IO;
        answer(device, in->unique, 0, &opened, sizeof opened);
        return;
    case FUSE_READ:
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        return;
    default:
        answer(device, in->unique, ENOSYS, NULL, 0);
    }
}

static void serve(int device) {
    static char buffer[1 << 17];
    struct pollfd waits[2] = {{device, POLLIN, 0}, {0, POLLIN, 0}};
    for (;;) {
        poll(waits, 2, -1);
        if (waits[1].revents) exit(0);
        if (read(device, buffer, sizeof buffer) < 0) {
            if (errno == ENODEV) exit(0);
            continue;
        }
        serve_one(device, (struct fuse_in_header *)buffer);
    }
}

static void *read_first(void *fd) {
    char byte;
    (void)!pread((int)(long)fd, &byte, 1, 0);
    return NULL;
}

static void *map_executable(void *fd) {
    for (;;) {
        void *at = mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, (int)(long)fd, 0);
        munmap(at, 4096);
    }
    return NULL;
}

static void fall_silent(int device, const char *directory, int number) {
    char path[4096];
    pthread_t thread;
    snprintf(path, sizeof path, "%s/%d", directory, number);
    close(device);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    long cached = open(path, O_RDONLY), program = open(mapped, O_RDONLY);
    check(cached, path);
    check(program, mapped);
    mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, program, 0);
    pthread_create(&thread, NULL, read_first, (void *)cached);
    usleep(50000);
    pthread_create(&thread, NULL, map_executable, (void *)program);
    usleep(5000);
    int direct = open(path, O_RDONLY);
    check(direct, path);
    mmap(NULL, SIZE, PROT_READ, MAP_PRIVATE, direct, 0);
    exit(1);
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    int device, count = atoi(argv[2]);
    mapped = argv[3];
    signal(SIGCHLD, SIG_IGN);
    mount_at(argv[1], argv[4], &device);
    for (int number = 0; number < count && number < MOST; number++) {
        pid_t pid = fork();
        check(pid, "fork");
        if (pid == 0) fall_silent(device, argv[1], number);
        printf("%d\n", pid);
    }
    printf("silent\n");
    fflush(stdout);
    serve(device);
}
