/* SPDX-License-Identifier: Apache-2.0
 *
 * loader MICROSECONDS LIBRARY: load a library, and end after a time.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc == 3 && dlopen(argv[2], RTLD_NOW) == NULL)
		return 1;
	usleep(atoi(argv[1]));
	_exit(0);
}
