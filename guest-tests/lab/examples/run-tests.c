// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * PID 1 that runs each program of /tests, and prints "test NAME exit CODE", "test NAME signal NUMBER" or
 * "test NAME timeout". The programs have a tmpfs and 64 huge pages.
 *
 * Option of the kernel's command line:
 *   seconds=N   time limit of a program (100)
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "pid1.h"

static void execute(const char *path)
{
	int null = open("/dev/null", O_RDWR);

	for (int i = 0; i < 3; i++)
		dup2(null, i);
	setpgid(0, 0);
	if (!chdir("/tmp"))
		execl(path, path, NULL);
	_exit(127);
}

static void run(const char *name, int seconds)
{
	char path[512];
	int status;
	pid_t child, ended = 0;
	time_t until = time(NULL) + seconds;

	snprintf(path, sizeof(path), "/tests/%s", name);
	child = fork();
	if (child < 0)
		fail("fork");
	if (!child)
		execute(path);
	while (!ended && time(NULL) < until) {
		usleep(10000);
		ended = waitpid(child, &status, WNOHANG);
	}
	/* Also those that the program has started, and left */
	kill(-child, SIGKILL);
	if (!ended)
		waitpid(child, &status, 0);
	while (waitpid(-1, NULL, WNOHANG) > 0)
		;
	if (!ended)
		printf("test %s timeout\n", name);
	else if (WIFSIGNALED(status))
		printf("test %s signal %d\n", name, WTERMSIG(status));
	else
		printf("test %s exit %d\n", name, WEXITSTATUS(status));
	fflush(stdout);
}

int main(void)
{
	struct dirent **names;
	int count, seconds;

	mount_all();
	seconds = option("seconds=", 100);
	mkdir("/tmp", 0777);
	mount("tmp", "/tmp", "tmpfs", 0, NULL);
	mkdir("/dev/shm", 0777);
	mount("shm", "/dev/shm", "tmpfs", 0, NULL);
	write_file("/proc/sys/vm/nr_hugepages", "64");
	count = scandir("/tests", &names, NULL, alphasort);
	if (count < 0)
		fail("/tests");
	for (int i = 0; i < count; i++)
		if (names[i]->d_name[0] != '.')
			run(names[i]->d_name, seconds);
	printf("end\n");
	end(0);
}
