/* SPDX-License-Identifier: Apache-2.0
 *
 * knownprogram LOADER MICROSECONDS PLACE FILE...: for each FILE, mount a tmpfs at PLACE, copy the file
 * there, let LOADER load it and end after a time, and unmount the tmpfs. All of this happens in one
 * mount namespace, in which LOADER has run before.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void copy(const char *from, const char *to)
{
	struct stat status;
	int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_EXCL, 0755);

	if (in < 0 || out < 0 || fstat(in, &status)
	    || sendfile(out, in, NULL, status.st_size) != status.st_size)
		err(1, "%s", to);
	close(in);
	close(out);
}

int main(int argc, char **argv)
{
	char path[PATH_MAX];
	char *words[] = { argv[1], argv[2], path, NULL }, *environment[] = { NULL };

	snprintf(path, sizeof path, "%s/library.so", argv[3]);
	for (int i = 4; i < argc; i++) {
		int status;
		pid_t pid;

		if (mount("none", argv[3], "tmpfs", 0, NULL))
			err(1, "mount");
		copy(argv[i], path);
		if (posix_spawn(&pid, words[0], NULL, NULL, words, environment)
		    || waitpid(pid, &status, 0) != pid || status)
			errx(1, "the loader failed for %s", argv[i]);
		if (umount2(argv[3], MNT_DETACH))
			err(1, "umount");
	}
	return 0;
}
