// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` that looks for mappings of memory that the host has taken back. In
// each round a vCPU writes to all pages of 2 MiB while a thread discards parts of them. Then the program
// writes other values to the pages, and the vCPU has to read these. Arguments: the number of rounds, and the
// memory: 4k, thp for a transparent huge page, or remap for base pages and a huge page in turn, which
// the thread maps in place of the memory.
//
// Exit code: 0 if the vCPU has read all values, 1 if not, 2 after an error.

#include "guest.h"

#define SIZE (2UL << 20)
#define PAGES (SIZE / PAGE_SIZE)
// Pages that the thread discards at a time.
#define PART 32
// Times that the thread maps other memory in a round; odd, so that rounds end with either kind.
#define REMAPS 9
#define POOL "/proc/sys/vm/nr_hugepages"

static char *data;
static int is_remap;
static pthread_barrier_t turn;
static unsigned long rounds;

// Maps base pages or a huge page, in turn, in place of the memory.
static void remap(unsigned long number)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | (number % 2 ? MAP_HUGETLB : 0);
	void *memory = mmap(data, SIZE, PROT_READ | PROT_WRITE, flags, -1, 0);

	check(memory == MAP_FAILED ? -1 : 0, "mmap");
	if (number % 2 == 0)
		check(madvise(data, SIZE, MADV_NOHUGEPAGE), "MADV_NOHUGEPAGE");
}

static void *discard(void *unused)
{
	run_on_cpu(1);
	for (unsigned long round = 0; round < rounds; round++) {
		pthread_barrier_wait(&turn);
		for (unsigned long number = 0; is_remap && number < REMAPS; number++)
			remap(round + number);
		for (unsigned long page = 0; !is_remap && page < PAGES; page += PART)
			check(madvise(data + page * PAGE_SIZE, PART * PAGE_SIZE, MADV_DONTNEED),
			      "MADV_DONTNEED");
		pthread_barrier_wait(&turn);
	}
	return unused;
}

// Has the vCPU read each page. Writes by a wrong mapping would destroy the host.
static void read_pages(const struct vcpu *vcpu)
{
	for (unsigned long page = 0; page < PAGES; page++)
		run(vcpu, page, 0, 0);
}

// Writes a value to each page and returns the number of pages that the vCPU reads otherwise.
static unsigned int stale_pages(const struct vcpu *vcpu, uint64_t value)
{
	unsigned int stale = 0;

	// From the last page on, so that the host does not allocate ascending pages.
	for (unsigned long page = PAGES; page-- > 0;)
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

	is_remap = count > 2 && !strcmp(arguments[2], "remap");
	if (is_remap)
		reserve_huge_pages(POOL, "2");
	rounds = count > 1 ? strtoul(arguments[1], NULL, 10) : 50;
	run_on_cpu(0);
	data = map_aligned(SIZE);
	check(madvise(data, SIZE, is_thp ? MADV_HUGEPAGE : MADV_NOHUGEPAGE), "madvise");
	create_vm();
	add_code();
	set_slot(1, DATA, data, SIZE, 0);
	vcpu = create_vcpu(0);
	if (is_remap) {
		// A fault on a huge page first: KVM must not remember that it is one.
		remap(1);
		run(&vcpu, 0, 0, 0);
	}
	check(-pthread_barrier_init(&turn, NULL, 2), "pthread_barrier_init");
	check(-pthread_create(&thread, NULL, discard, NULL), "pthread_create");
	for (unsigned long round = 0; round < rounds; round++) {
		pthread_barrier_wait(&turn);
		if (is_remap)
			read_pages(&vcpu);
		else
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
