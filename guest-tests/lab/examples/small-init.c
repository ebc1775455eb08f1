// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A PID 1 that makes the initramfs of a guest small, for `granule lab guest --vmm` (docs/boot-cost.md): the
// lab's own is the whole `granule` program. It marks its start, lets each vCPU write its part of 128 MiB,
// reports vCPUs and memory as the lab expects it, and powers off while the memory is mapped.

#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>

#include "pid1.h"

#define WRITTEN_BYTES (128UL << 20)

// Writes a byte of each page, on one vCPU.
static void write_part(int cpu, unsigned long bytes)
{
	unsigned long at, page = (unsigned long)sysconf(_SC_PAGESIZE);
	volatile char *memory;
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		fail("sched_setaffinity");
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		fail("mmap");
	for (at = 0; at < bytes; at += page)
		memory[at] = 1;
}

int main(void)
{
	int cpu, cpus, status;
	struct sysinfo info;
	pid_t child;

	__asm__ volatile("hint #0x72" : : : "memory");
	mount_all();
	printf("granule-guest: init\n");
	fflush(stdout);
	cpus = get_nprocs();
	for (cpu = 0; cpu < cpus; cpu++) {
		child = fork();
		if (child < 0)
			fail("fork");
		if (child == 0) {
			write_part(cpu, WRITTEN_BYTES / (unsigned long)cpus);
			// An exit would free the pages, which is no work of the VMM or its host.
			raise(SIGSTOP);
			_exit(0);
		}
	}
	for (cpu = 0; cpu < cpus; cpu++)
		if (waitpid(-1, &status, WUNTRACED) < 0 || !WIFSTOPPED(status)) {
			printf("a process could not write its part: status %#x\n", status);
			end(1);
		}
	if (sysinfo(&info))
		fail("sysinfo");
	printf("granule-guest: works, vcpus %d, memory %lu MiB\n", cpus, info.totalram * info.mem_unit >> 20);
	end(0);
}
