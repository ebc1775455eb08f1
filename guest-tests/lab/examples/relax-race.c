// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab check --hold` in which dirty logging may miss pages (docs/relax-race.md).
// It migrates 2 MiB of hugetlb memory as a VMM does, and compares source and copy. Arguments: thp, for
// a transparent huge page; eager, to split blocks when logging is enabled.
//
//	user space			late vCPU			other vCPU
//	logging on
//					reads a page: 4K leaf
//					getsid(), writes the page:
//					  permission fault of level 3
//	logging off			  (held before it looks
//					  up the memslot)		writes: 2M block
//	logging on: block read-only
//	copies the memory, getpgid()
//					  continues			writes all pages
//	copies the dirty pages
//
// Exit code: 0 if the copy equals the memory, 1 if it differs, 2 after an error.

#include "guest.h"

#define BLOCK_SIZE (2UL << 20)
#define PAGES (BLOCK_SIZE / PAGE_SIZE)
#ifndef KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE
#define KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE 228
#endif
#define POOL "/proc/sys/vm/nr_hugepages"

#define LATE_PAGE 7
// Time in which the late vCPU arrives at its fault.
#define ARRIVAL_US 20000

static struct vcpu late, other;
static char *data;

static void set_logging(int is_on)
{
	set_slot(1, DATA, data, BLOCK_SIZE, is_on ? KVM_MEM_LOG_DIRTY_PAGES : 0);
}

static void *run_late_vcpu(void *unused)
{
	run_on_cpu(1);
	run(&late, LATE_PAGE, 0, 0);
	getsid(0);
	run(&late, LATE_PAGE, 2, 1);
	return unused;
}

static char *map_thp(void)
{
	char *block = map_aligned(BLOCK_SIZE);

	check(madvise(block, BLOCK_SIZE, MADV_HUGEPAGE), "MADV_HUGEPAGE");
	return block;
}

static char *map_hugetlb(void)
{
	reserve_huge_pages(POOL, "1");
	return map(BLOCK_SIZE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1);
}

static void create_race(int is_eager)
{
	struct kvm_enable_cap split = {
		.cap = KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE,
		.args = { BLOCK_SIZE },
	};

	create_vm();
	if (is_eager)
		check(ioctl(vm, KVM_ENABLE_CAP, &split), "KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE");
	add_code();
	memset(data, 1, BLOCK_SIZE);
	set_logging(1);
	late = create_vcpu(0);
	other = create_vcpu(1);
}

int main(int count, char **arguments)
{
	static uint64_t bitmap[PAGES / 64];
	struct kvm_dirty_log log = { .slot = 1, .dirty_bitmap = bitmap };
	unsigned int dirty = 0, different = 0;
	char *copy = map(BLOCK_SIZE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	const char *argument = count > 1 ? arguments[1] : "";
	pthread_t thread;

	run_on_cpu(0);
	data = !strcmp(argument, "thp") ? map_thp() : map_hugetlb();
	create_race(!strcmp(argument, "eager"));
	check(-pthread_create(&thread, NULL, run_late_vcpu, NULL), "pthread_create");
	usleep(ARRIVAL_US);
	set_logging(0);
	run(&other, LATE_PAGE + 1, 3, 1);
	set_logging(1);
	memcpy(copy, data, BLOCK_SIZE);
	getpgid(0);
	pthread_join(thread, NULL);
	run(&other, 0, 4, PAGES);

	check(ioctl(vm, KVM_GET_DIRTY_LOG, &log), "KVM_GET_DIRTY_LOG");
	for (unsigned long page = 0; page < PAGES; page++) {
		unsigned long offset = page * PAGE_SIZE;

		if (bitmap[page / 64] >> page % 64 & 1) {
			dirty++;
			memcpy(copy + offset, data + offset, PAGE_SIZE);
		}
		different += memcmp(copy + offset, data + offset, PAGE_SIZE) != 0;
	}
	printf("%u of %lu pages are marked dirty, %u pages differ\n", dirty, PAGES, different);
	return different ? EXIT_FAILURE : EXIT_SUCCESS;
}
