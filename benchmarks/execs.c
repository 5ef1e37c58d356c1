/* SPDX-License-Identifier: Apache-2.0
 *
 * Starts one program again and again and waits for each: execs COUNT PROGRAM
 * Prints the median of the nanoseconds from posix_spawn to the end of the program, and the sum.
 */
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

static long long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int by_value(const void *left, const void *right)
{
	long long a = *(const long long *)left, b = *(const long long *)right;

	return (a > b) - (a < b);
}

int main(int argc, char **argv)
{
	long count = argc == 3 ? atol(argv[1]) : 0;
	long long *taken = calloc(count + 1, sizeof *taken);
	long long begin = now();
	char *words[] = { argv[2], NULL }, *environment[] = { NULL };

	if (count < 1)
		return 2;
	for (long i = 0; i < count; i++) {
		long long start = now();
		int status;
		pid_t pid;

		/* glibc: clone(CLONE_VM | CLONE_VFORK), so the cost of a large parent is not in it */
		if (posix_spawn(&pid, words[0], NULL, NULL, words, environment))
			return 3;
		if (waitpid(pid, &status, 0) != pid || status)
			return 4;
		taken[i] = now() - start;
	}
	begin = now() - begin;
	qsort(taken, count, sizeof *taken, by_value);
	printf("{\"p50_ns\": %lld, \"wall_ns\": %lld}\n", taken[count / 2], begin);
	return 0;
}
