// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * PID 1 of a test: mounts the file systems of the kernel, reads options of the kernel's command line, and powers
 * the machine off. A program that is not PID 1 exits instead.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <unistd.h>

/* The kernel's dump of its own page tables */
#define DUMP "/sys/kernel/debug/kernel_page_tables"

static void end(int code)
{
	fflush(stdout);
	if (getpid() == 1)
		reboot(RB_POWER_OFF);
	exit(code);
}

static void fail(const char *call)
{
	perror(call);
	end(1);
}

static inline void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	/* A kernel may lack the file */
	if (fd < 0)
		return;
	if (write(fd, text, strlen(text)) < 0)
		perror(path);
	close(fd);
}

static void mount_all(void)
{
	int fd;

	mkdir("/proc", 0755);
	mkdir("/sys", 0755);
	mkdir("/dev", 0755);
	mount("dev", "/dev", "devtmpfs", 0, NULL);
	fd = open("/dev/console", O_RDWR);
	for (int i = 0; i < 3; i++)
		dup2(fd, i);
	mount("proc", "/proc", "proc", 0, NULL);
	mount("sys", "/sys", "sysfs", 0, NULL);
	mount("debug", "/sys/kernel/debug", "debugfs", 0, NULL);
}

/* Returns the number behind the option "NAME=" of the kernel's command line */
static inline int option(const char *name, int value)
{
	static char line[4096];
	FILE *file = fopen("/proc/cmdline", "r");
	char *at;

	if (!file || !fgets(line, sizeof(line), file))
		fail("/proc/cmdline");
	fclose(file);
	at = strstr(line, name);
	return at ? atoi(at + strlen(name)) : value;
}
