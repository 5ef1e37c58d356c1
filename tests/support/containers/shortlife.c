/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs programs that are gone at once, and with each of them its mount namespace and filesystem.
 *
 *     shortlife CONFIG CONCURRENCY LIFE_US ITEMS COUNT CRUN CGROUP LIBRARY...
 *
 * ITEMS/0 to ITEMS/COUNT-1 are directories made by shortlife.py. In each: content/exe and
 * content/libitem.so, or an image with both; root, where the filesystem goes; extra, where an
 * overlay has its upper layer. ITEMS/../base has the libraries for the lower layer of overlays.
 * The process that mounts is the one that becomes the program, so nothing holds the namespace
 * once the program has ended. Prints the nanoseconds from the first start to the last end;
 * any item that does not end with 0 makes the exit status 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <linux/magic.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST 64
#define NOT_STARTED 125

static const char *config, *life, *items, *crun, *cgroup;
static char **libraries;

static void fail(const char *what)
{
	fprintf(stderr, "shortlife: %s: %s: %s\n", config, what, strerror(errno));
	_exit(NOT_STARTED);
}

static int is(const char *name)
{
	return strcmp(config, name) == 0;
}

static void copy(const char *from, const char *to)
{
	struct stat about;
	int in = open(from, O_RDONLY | O_CLOEXEC);
	int out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0755);

	if (in < 0 || out < 0 || fstat(in, &about))
		fail(to);
	for (off_t left = about.st_size; left > 0;) {
		ssize_t sent = sendfile(out, in, NULL, left);

		if (sent <= 0)
			fail("sendfile");
		left -= sent;
	}
	/* An open descriptor for writing would refuse the execution (ETXTBSY). */
	if (close(out) || close(in))
		fail("close");
}

/* The host's own libraries, at the same paths below root; the files to cover are made if wanted. */
static void bind_libraries(int create)
{
	char target[512];

	for (char **library = libraries; *library; library++) {
		snprintf(target, sizeof target, "root%s", *library);
		if (create) {
			for (char *at = strchr(target + 5, '/'); at; at = strchr(at + 1, '/')) {
				*at = 0;
				if (mkdir(target, 0755) && errno != EEXIST)
					fail(target);
				*at = '/';
			}
			if (close(open(target, O_WRONLY | O_CREAT, 0755)))
				fail(target);
		}
		if (mount(*library, target, NULL, MS_BIND, NULL))
			fail(target);
	}
}

/* Attach the image to a free loop device, which the kernel detaches with the last unmount. */
static int attach(char *device, size_t size)
{
	struct loop_config setup = {
		.info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_READ_ONLY,
	};
	int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
	int image = open("image", O_RDONLY | O_CLOEXEC);

	if (control < 0 || image < 0)
		fail("loop-control or image");
	setup.fd = image;
	for (int attempt = 0; attempt < 200; attempt++) {
		int number = ioctl(control, LOOP_CTL_GET_FREE);
		int fd;

		if (number < 0)
			fail("LOOP_CTL_GET_FREE");
		snprintf(device, size, "/dev/loop%d", number);
		fd = open(device, O_RDONLY | O_CLOEXEC);
		if (fd >= 0 && ioctl(fd, LOOP_CONFIGURE, &setup) == 0)
			return fd;
		/* Somebody else took it meanwhile. */
		if (fd >= 0)
			close(fd);
	}
	fail("LOOP_CONFIGURE");
	return -1;
}

static void mount_image(const char *type)
{
	char device[32];
	int fd = attach(device, sizeof device);

	if (mount(device, "root", type, MS_RDONLY, NULL))
		fail(type);
	close(fd);
	bind_libraries(0);
}

/* The executable stays in a lower layer, the library is copied up. */
static void mount_overlay(void)
{
	if (mount("none", "extra", "tmpfs", 0, NULL))
		fail("tmpfs");
	if (mkdir("extra/upper", 0755) || mkdir("extra/work", 0755))
		fail("mkdir");
	if (mount("none", "root", "overlay", 0,
		  "lowerdir=content:../../base,upperdir=extra/upper,workdir=extra/work"))
		fail("overlay");
	copy("content/libitem.so", "root/libitem.so");
}

static void become_item(int number)
{
	char path[512];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	snprintf(path, sizeof path, "%s/%d", items, number);
	if (chdir(path))
		fail(path);
	if (is("host")) {
		snprintf(path, sizeof path, "%s/%d/content/exe", items, number);
		execl(path, path, life, NULL);
		fail("exec");
	}
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		fail("unshare");
	if (is("tmpfs")) {
		if (mount("none", "root", "tmpfs", 0, NULL))
			fail("tmpfs");
		copy("content/exe", "root/exe");
		copy("content/libitem.so", "root/libitem.so");
		bind_libraries(1);
	} else if (is("loop-ext4")) {
		mount_image("ext4");
	} else if (is("squashfs")) {
		mount_image("squashfs");
	} else {
		mount_overlay();
	}
	if (is("crun")) {
		char name[64];

		snprintf(name, sizeof name, "%s-%d", cgroup, number);
		execl(crun, crun, "--root", "../../state", "run", "--bundle", ".", name, NULL);
		fail("exec crun");
	}
	if (chroot("root") || chdir("/"))
		fail("chroot");
	execl("/exe", "/exe", life, NULL);
	fail("exec");
}

/* Nothing of the item is left on the host once it has ended. */
static void remove_item(int number)
{
	static const char *const files[] = {
		"content/exe", "content/libitem.so", "image", "config.json",
	};
	static const char *const directories[] = { "content", "root", "extra", "" };
	char path[512];

	for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
		snprintf(path, sizeof path, "%s/%d/%s", items, number, files[i]);
		unlink(path);
	}
	for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
		snprintf(path, sizeof path, "%s/%d/%s", items, number, directories[i]);
		rmdir(path);
	}
	snprintf(path, sizeof path, "/sys/fs/cgroup/%s/%d", cgroup, number);
	if (is("crun"))
		rmdir(path);
}

/* crun refuses the hybrid layout of cgroups: show it the unified hierarchy only. */
static void only_unified_cgroups(void)
{
	struct statfs about;

	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		fail("unshare");
	if (statfs("/sys/fs/cgroup", &about) == 0 && about.f_type == CGROUP2_SUPER_MAGIC)
		return;
	umount2("/sys/fs/cgroup", MNT_DETACH);
	if (mount("none", "/sys/fs/cgroup", "cgroup2", 0, NULL))
		fail("cgroup2");
}

static int wait_for_one(pid_t *running, int *numbers, int concurrency)
{
	int status, slot;

	do {
		pid_t pid = wait(&status);

		if (pid < 0)
			fail("wait");
		for (slot = 0; slot < concurrency && running[slot] != pid; slot++)
			;
	} while (slot == concurrency);
	running[slot] = 0;
	remove_item(numbers[slot]);
	if (status)
		fprintf(stderr, "shortlife: item %d ended with status %#x\n", numbers[slot], status);
	return status != 0;
}

int main(int argc, char **argv)
{
	pid_t running[MOST] = { 0 };
	int numbers[MOST], concurrency, count, failed = 0, alive = 0, started = 0;
	struct timespec begin, end;
	char path[512];

	if (argc < 9)
		return 2;
	config = argv[1], concurrency = atoi(argv[2]), life = argv[3], items = argv[4];
	count = atoi(argv[5]), crun = argv[6], cgroup = argv[7], libraries = argv + 8;
	if (concurrency < 1 || concurrency > MOST)
		return 2;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (is("crun"))
		only_unified_cgroups();
	clock_gettime(CLOCK_MONOTONIC, &begin);
	while (started < count || alive) {
		if (started < count && alive < concurrency) {
			int slot = 0;

			while (running[slot])
				slot++;
			numbers[slot] = started++;
			running[slot] = fork();
			if (running[slot] < 0)
				fail("fork");
			if (running[slot] == 0)
				become_item(numbers[slot]);
			alive++;
		} else {
			failed += wait_for_one(running, numbers, concurrency);
			alive--;
		}
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	snprintf(path, sizeof path, "/sys/fs/cgroup/%s", cgroup);
	if (is("crun"))
		rmdir(path);
	printf("%lld\n", (end.tv_sec - begin.tv_sec) * 1000000000LL + end.tv_nsec - begin.tv_nsec);
	return failed != 0;
}
