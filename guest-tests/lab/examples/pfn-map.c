// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` and `granule lab check` whose guest has memory that the host
// maps by page numbers (VM_PFNMAP), as it maps registers of devices: through /dev/mem, 16M of RAM, or of
// memory that Linux does not use, which KVM maps as a device. Usage: pfn-map, or pfn-map ADDRESS with
// 16M behind `--append mem=SIZE`. A vCPU writes all pages (step 1), reads some while the host may not
// write them (step 2), and writes all again (step 3). Needs CONFIG_DEVMEM, for RAM without
// CONFIG_STRICT_DEVMEM (devmem.config). KVM does not log such memory.
//
// Exit code: 0 if host and guest read what the guest wrote, 1 if not, 2 after an error.

#include "guest.h"
#include "step.h"

#define BLOCK (2UL << 20)
#define SIZE (8 * BLOCK)
#define PAGES (SIZE / PAGE_SIZE)
// Pages from one read of the guest to the next.
#define READ_DISTANCE 64
// Pages among which blocks of RAM are looked for, and those of a block.
#define CANDIDATES (8 * PAGES)
#define BLOCK_PAGES (BLOCK / PAGE_SIZE)
// Only blocks below 64G are looked for.
#define FRAMES (1UL << 24)
#define PRESENT (1UL << 63)
#define FRAME_MASK ((1UL << 55) - 1)

static int device;

// Maps the physical address at an address of this process.
static void map_physical(char *at, uint64_t physical, size_t size)
{
	char *mapped = mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, device, (off_t)physical);

	check(mapped == at ? 0 : -1, "mmap of /dev/mem");
}

// Maps blocks of RAM by their numbers: blocks that this process has as base pages. The pages of a large
// folio have no references of their own, so KVM refuses them.
static void map_ram(char *memory)
{
	static uint64_t entries[CANDIDATES];
	static uint16_t owned[FRAMES / BLOCK_PAGES];
	int pagemap = (int)check(open("/proc/self/pagemap", O_RDONLY), "/proc/self/pagemap");
	char *pages = map(CANDIDATES * PAGE_SIZE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	uint64_t found = 0;

	check(madvise(pages, CANDIDATES * PAGE_SIZE, MADV_NOHUGEPAGE), "MADV_NOHUGEPAGE");
	check(mlock(pages, CANDIDATES * PAGE_SIZE), "mlock");
	check(pread(pagemap, entries, sizeof(entries), (off_t)((uintptr_t)pages / PAGE_SIZE * 8)) ==
	      sizeof(entries) ? 0 : -1, "/proc/self/pagemap");
	for (uint64_t page = 0; page < CANDIDATES; page++) {
		uint64_t frame = entries[page] & FRAME_MASK;

		if (entries[page] & PRESENT && frame < FRAMES)
			owned[frame / BLOCK_PAGES]++;
	}
	for (uint64_t block = 0; block < FRAMES / BLOCK_PAGES && found < SIZE; block++) {
		if (owned[block] != BLOCK_PAGES)
			continue;
		map_physical(memory + found, block * BLOCK, BLOCK);
		found += BLOCK;
	}
	if (found < SIZE) {
		fprintf(stderr, "only %lu blocks of memory have all their pages here\n", found / BLOCK);
		exit(2);
	}
}

static unsigned int wrong_pages(const char *memory, uint64_t value)
{
	unsigned int wrong = 0;

	for (uint64_t page = 0; page < PAGES; page++)
		wrong += *(const volatile uint64_t *)(memory + page * PAGE_SIZE) != value;
	return wrong;
}

int main(int argc, char **argv)
{
	struct vcpu vcpu;
	unsigned int wrong;
	char *memory;

	run_on_cpu(0);
	device = (int)check(open("/dev/mem", O_RDWR), "/dev/mem");
	memory = map_aligned(SIZE);
	if (argc > 1)
		map_physical(memory, strtoull(argv[1], NULL, 0), SIZE);
	else
		map_ram(memory);
	create_vm();
	add_code();
	set_slot(1, DATA, memory, SIZE, 0);
	vcpu = create_vcpu(0);
	BEGIN_STEP(1);
	run(&vcpu, 0, 1, PAGES);
	END_STEP();
	wrong = wrong_pages(memory, 1);
	check(mprotect(memory, SIZE, PROT_READ), "PROT_READ");
	BEGIN_STEP(2);
	for (uint64_t page = 0; page < PAGES; page += READ_DISTANCE) {
		run(&vcpu, page, 0, 0);
		// The guest stores what it has read.
		wrong += *(uint64_t *)vcpu.run->mmio.data != 1;
	}
	END_STEP();
	check(mprotect(memory, SIZE, PROT_READ | PROT_WRITE), "PROT_WRITE");
	BEGIN_STEP(3);
	run(&vcpu, 0, 2, PAGES);
	END_STEP();
	wrong += wrong_pages(memory, 2);
	printf("%u pages have another value\n", wrong);
	return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
