// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` that looks for mappings of memory that the host has taken back. In
// each round a vCPU writes to all pages of 2 MiB while a thread discards parts of them. Then the program
// writes other values to the pages, and the vCPU has to read these. Arguments: the number of rounds, and
// thp for a transparent huge page.
//
// Exit code: 0 if the vCPU has read all values, 1 if not, 2 after an error.

#include "guest.h"

#define SIZE (2UL << 20)
#define PAGES (SIZE / PAGE_SIZE)
// Pages that the thread discards at a time.
#define PART 32

static char *data;
static pthread_barrier_t turn;
static unsigned long rounds;

static void *discard(void *unused)
{
	run_on_cpu(1);
	for (unsigned long round = 0; round < rounds; round++) {
		pthread_barrier_wait(&turn);
		for (unsigned long page = 0; page < PAGES; page += PART)
			check(madvise(data + page * PAGE_SIZE, PART * PAGE_SIZE, MADV_DONTNEED),
			      "MADV_DONTNEED");
		pthread_barrier_wait(&turn);
	}
	return unused;
}

// Writes a value to each page and returns the number of pages that the vCPU reads otherwise.
static unsigned int stale_pages(const struct vcpu *vcpu, uint64_t value)
{
	unsigned int stale = 0;

	for (unsigned long page = 0; page < PAGES; page++)
		*(volatile uint64_t *)(data + page * PAGE_SIZE) = value + page;
	for (unsigned long page = 0; page < PAGES; page++) {
		uint64_t read;

		run(vcpu, page, 0, 0);
		memcpy(&read, vcpu->run->mmio.data, sizeof(read));
		stale += read != value + page;
	}
	return stale;
}

int main(int count, char **arguments)
{
	int is_thp = count > 2 && !strcmp(arguments[2], "thp");
	unsigned int stale = 0;
	struct vcpu vcpu;
	pthread_t thread;

	rounds = count > 1 ? strtoul(arguments[1], NULL, 10) : 50;
	run_on_cpu(0);
	data = map_aligned(SIZE);
	check(madvise(data, SIZE, is_thp ? MADV_HUGEPAGE : MADV_NOHUGEPAGE), "madvise");
	create_vm();
	add_code();
	set_slot(1, DATA, data, SIZE, 0);
	vcpu = create_vcpu(0);
	check(-pthread_barrier_init(&turn, NULL, 2), "pthread_barrier_init");
	check(-pthread_create(&thread, NULL, discard, NULL), "pthread_create");
	for (unsigned long round = 0; round < rounds; round++) {
		pthread_barrier_wait(&turn);
		run(&vcpu, 0, 1, PAGES);
		pthread_barrier_wait(&turn);
		stale += stale_pages(&vcpu, (round + 1) << 32);
		if (is_thp)
			check(madvise(data, SIZE, MADV_DONTNEED), "MADV_DONTNEED");
	}
	pthread_join(thread, NULL);
	printf("%lu rounds, %u stale pages\n", rounds, stale);
	return stale ? EXIT_FAILURE : EXIT_SUCCESS;
}
