/* SPDX-License-Identifier: Apache-2.0
 *
 * Maps files that no machine has seen before, as fast as it is told to.
 *
 *     flood DIRECTORY TEMPLATE OFFSET RATE WORKERS FIRST
 *
 * Each file is a copy of TEMPLATE with eight new bytes at OFFSET, where its build ID is. It is
 * made in DIRECTORY, mapped executable, and deleted. RATE is in files a second, 0 for as many as
 * there can be, from WORKERS processes together. Each worker prints "up" when it has mapped its part
 * of FIRST files, and, when its standard input ends, how many it has mapped, and in how many
 * nanoseconds.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char content[1 << 16];

static long long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void map_one(unsigned long long number, size_t size, size_t offset)
{
	char name[32];
	void *mapped;
	int fd;

	snprintf(name, sizeof name, "flood-%llu", number);
	memcpy(content + offset, &number, sizeof number);
	fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0755);
	if (fd < 0 || write(fd, content, size) != (ssize_t)size || close(fd))
		die(name);
	fd = open(name, O_RDONLY | O_CLOEXEC);
	mapped = mmap(NULL, size, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
	if (mapped == MAP_FAILED)
		die("mmap");
	close(fd);
	munmap(mapped, size);
	unlink(name);
}

static void work(double rate, size_t size, size_t offset, unsigned long long first)
{
	struct pollfd input = { .fd = 0, .events = POLLIN };
	struct timespec pause = { 0, 1000000 };
	unsigned long long number, count = 0;
	long long start, at;
	int is_up = 0;

	if (getrandom(&number, sizeof number, 0) != sizeof number)
		die("getrandom");
	start = at = now();
	while (poll(&input, 1, 0) == 0) {
		unsigned long long due = rate > 0 ? (at - start) / 1e9 * rate : count + 64;

		for (; count < due; count++)
			map_one(number + count, size, offset);
		if (!is_up && count >= first) {
			puts("up");
			fflush(stdout);
			is_up = 1;
		}
		if (rate > 0)
			nanosleep(&pause, NULL);
		at = now();
	}
	printf("%llu %lld\n", count, at - start);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	ssize_t size;
	int fd, workers;

	if (argc != 7)
		return 2;
	fd = open(argv[2], O_RDONLY);
	size = read(fd, content, sizeof content);
	if (size <= 0 || chdir(argv[1]))
		die(argv[1]);
	workers = atoi(argv[5]);
	for (int number = 1; number < workers; number++)
		if (fork() == 0)
			break;
	work(atof(argv[4]) / workers, size, atol(argv[3]), atol(argv[6]) / workers);
	while (wait(NULL) > 0)
		;
	return 0;
}
