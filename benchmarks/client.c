// SPDX-License-Identifier: Apache-2.0
/*
 * The reader's side of the benchmarks: loops of system calls with so little around them that the
 * time is the filesystem's. In C because an interpreter costs as much as a native open.
 *
 *   client open|stat|missing CLIENTS REPEAT PATHS   each line of PATHS is a path; CLIENTS processes
 *                                                   share the list, each goes REPEAT times through
 *                                                   its part
 *   client sequential FILE                          read to the end, 256 KiB at a time
 *   client faults FILE COUNT                        touch COUNT random pages of a shared mapping
 *
 * Prints one JSON object: operations, wall clock and percentiles in nanoseconds, and `errors`, the
 * number of operations that did not end as the mode expects (a stat of a missing name must fail).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, CHUNK = 256 * 1024 };

struct shared {
	pthread_barrier_t barrier;
	uint64_t errors;
	uint64_t sum;
};

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void *shared_memory(size_t size)
{
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	return memory;
}

static int open_read_close(const char *path)
{
	static char page[PAGE];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	int bad;

	if (fd < 0)
		return 1;
	bad = read(fd, page, PAGE) != PAGE;
	close(fd);
	return bad;
}

static int stat_present(const char *path)
{
	struct stat status;

	return stat(path, &status) != 0;
}

static int stat_missing(const char *path)
{
	struct stat status;

	return stat(path, &status) == 0 || errno != ENOENT;
}

static char **read_lines(const char *file, size_t *count)
{
	FILE *input = fopen(file, "r");
	char **lines = NULL, *line = NULL;
	size_t room = 0, used = 0, size = 0;
	ssize_t length;

	if (!input)
		die(file);
	while ((length = getline(&line, &size, input)) > 0) {
		if (line[length - 1] == '\n')
			line[length - 1] = '\0';
		if (used == room) {
			room = room ? room * 2 : 1024;
			lines = realloc(lines, room * sizeof(*lines));
			if (!lines)
				die("realloc");
		}
		lines[used++] = strdup(line);
	}
	free(line);
	fclose(input);
	*count = used;
	return lines;
}

static int ascending(const void *left, const void *right)
{
	uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;

	return (a > b) - (a < b);
}

static void report(uint64_t *times, size_t count, uint64_t wall, const struct shared *shared)
{
	qsort(times, count, sizeof(*times), ascending);
	printf("{\"operations\": %zu, \"wall_ns\": %lu, \"p50_ns\": %lu, \"p99_ns\": %lu, "
	       "\"max_ns\": %lu, \"errors\": %lu, \"sum\": %lu}\n",
	       count, wall, times[count / 2], times[count * 99 / 100], times[count - 1],
	       shared->errors, shared->sum);
}

static int run_paths(int (*operation)(const char *), size_t clients, size_t repeat, const char *file)
{
	struct shared *shared = shared_memory(sizeof(*shared));
	pthread_barrierattr_t attributes;
	size_t count, client, round, i, slot;
	char **paths = read_lines(file, &count);
	uint64_t *times, begin;

	if (!count)
		die("no paths");
	times = shared_memory(count * repeat * sizeof(*times));
	/* Touched here, or the first clock reading of each page would pay for a fault. */
	memset(times, 1, count * repeat * sizeof(*times));
	pthread_barrierattr_init(&attributes);
	pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&shared->barrier, &attributes, (unsigned)clients + 1);
	for (client = 0; client < clients; client++) {
		size_t from = count * client / clients, to = count * (client + 1) / clients;
		pid_t pid = fork();

		if (pid < 0)
			die("fork");
		if (pid)
			continue;
		slot = from * repeat;
		pthread_barrier_wait(&shared->barrier);
		for (round = 0; round < repeat; round++)
			for (i = from; i < to; i++) {
				uint64_t start = now();
				int bad = operation(paths[i]);

				times[slot++] = now() - start;
				if (bad)
					__atomic_add_fetch(&shared->errors, 1, __ATOMIC_RELAXED);
			}
		_exit(0);
	}
	begin = now();
	pthread_barrier_wait(&shared->barrier);
	while (wait(NULL) > 0)
		;
	report(times, count * repeat, now() - begin, shared);
	return 0;
}

static int run_sequential(const char *file)
{
	struct shared shared = { .sum = 0 };
	char *buffer = malloc(CHUNK);
	uint64_t begin, wall;
	ssize_t got;
	int fd;

	if (!buffer)
		die("malloc");
	memset(buffer, 1, CHUNK);
	begin = now();
	fd = open(file, O_RDONLY);
	if (fd < 0)
		die(file);
	while ((got = read(fd, buffer, CHUNK)) > 0)
		shared.sum += (uint64_t)got;
	if (got < 0)
		die("read");
	close(fd);
	wall = now() - begin;
	report(&wall, 1, wall, &shared);
	return 0;
}

static int run_faults(const char *file, size_t count)
{
	struct shared shared = { .sum = 0 };
	uint64_t random = 88172645463325252u, *times = malloc(count * sizeof(*times)), begin, wall;
	struct stat status;
	const volatile unsigned char *bytes;
	size_t i;
	int fd = open(file, O_RDONLY);

	if (fd < 0 || fstat(fd, &status) || !times)
		die(file);
	memset(times, 1, count * sizeof(*times));
	bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (bytes == MAP_FAILED)
		die("mmap");
	begin = now();
	for (i = 0; i < count; i++) {
		uint64_t start = now();

		random ^= random << 13;
		random ^= random >> 7;
		random ^= random << 17;
		shared.sum += bytes[random % (uint64_t)(status.st_size / PAGE) * PAGE];
		times[i] = now() - start;
	}
	wall = now() - begin;
	report(times, count, wall, &shared);
	return 0;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";

	if (argc == 5 && !strcmp(mode, "open"))
		return run_paths(open_read_close, strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10),
				 argv[4]);
	if (argc == 5 && !strcmp(mode, "stat"))
		return run_paths(stat_present, strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10),
				 argv[4]);
	if (argc == 5 && !strcmp(mode, "missing"))
		return run_paths(stat_missing, strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10),
				 argv[4]);
	if (argc == 3 && !strcmp(mode, "sequential"))
		return run_sequential(argv[2]);
	if (argc == 4 && !strcmp(mode, "faults"))
		return run_faults(argv[2], strtoul(argv[3], NULL, 10));
	fprintf(stderr, "usage: see the head of client.c\n");
	return 2;
}
