// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Runs the program `vmm` of this program's directory with the same arguments, and prints its peak resident
// memory, without hugetlb pages, and its page faults (docs/boot-cost.md). The emulated host's PID 1 cannot
// report them: the kernel counts its own memory for a program that it starts.

#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	struct rusage usage;
	int status;
	pid_t vmm = fork();

	(void)argc;
	if (vmm == 0) {
		execv("./vmm", argv);
		perror("./vmm");
		_exit(2);
	}
	if (vmm < 0 || wait4(vmm, &status, 0, &usage) != vmm) {
		perror("fork, wait4");
		return 2;
	}
	printf("vmm: peak resident %ldK, %ld page faults\n", usage.ru_maxrss, usage.ru_minflt);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
