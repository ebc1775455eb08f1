// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` with two marked steps: the first touch of 16 MiB, and a
// second write to each page (docs/workloads.md).

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "step.h"

static void write_pages(volatile char *memory, size_t size, size_t page)
{
	for (size_t offset = 0; offset < size; offset += page)
		memory[offset]++;
}

int main(void)
{
	size_t size = 16 << 20, page = (size_t)sysconf(_SC_PAGESIZE);
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED) {
		perror("mmap");
		return EXIT_FAILURE;
	}
	BEGIN_STEP(1);
	write_pages(memory, size, page);
	END_STEP();
	BEGIN_STEP(2);
	write_pages(memory, size, page);
	END_STEP();
	printf("wrote %zu pages twice\n", size / page);
	return memory[0] == 2 ? EXIT_SUCCESS : EXIT_FAILURE;
}
