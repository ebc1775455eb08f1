// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` that looks for MTE tags that a guest gets from an earlier user of
// its memory. A process tags all of a hugetlb page of 64K and frees it. A VM with MTE gets the same page,
// and its vCPU reads the first 4K, so that KVM clears tags. Then the tags of all 64K are read as the
// guest's. In a second VM, user space writes the tags of the first 4K before. Needs CONFIG_ARM64_MTE, and
// an emulator with mte=on.
//
// Exit code: 0 if all tags are cleared, 1 if not, 2 after an error.

#include "guest.h"

#include <stdbool.h>
#include <sys/auxv.h>

#define SIZE (64UL << 10)
#define TAG 5UL
#define TAG_GRANULE 16UL
#define HUGETLB (MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | 16 << MAP_HUGE_SHIFT)
#define POOL "/sys/kernel/mm/hugepages/hugepages-64kB/nr_hugepages"
#ifndef PROT_MTE
#define PROT_MTE 0x20
#endif

static void tag_a_page_and_free_it(void)
{
	char *memory = map(SIZE, HUGETLB, -1);

	check(mprotect(memory, SIZE, PROT_READ | PROT_WRITE | PROT_MTE), "PROT_MTE");
	for (unsigned long at = 0; at < SIZE; at += TAG_GRANULE) {
		uint64_t tagged = (uint64_t)(memory + at) | TAG << 56;

		__asm__ volatile(".arch armv8.5-a+memtag\n stg %0, [%0]" : : "r"(tagged) : "memory");
	}
	check(munmap(memory, SIZE), "munmap");
}

static void copy_tags(unsigned char *tags, unsigned long length, unsigned long direction)
{
	struct kvm_arm_copy_mte_tags copy = {
		.guest_ipa = DATA,
		.length = length,
		.addr = tags,
		.flags = direction,
	};

	check(ioctl(vm, KVM_ARM_MTE_COPY_TAGS, &copy), "KVM_ARM_MTE_COPY_TAGS");
}

// Returns the number of tags that a guest gets from an earlier user.
static unsigned int stale_tags(bool tags_are_written)
{
	struct kvm_enable_cap mte = { .cap = KVM_CAP_ARM_MTE };
	static unsigned char tags[SIZE / TAG_GRANULE];
	unsigned int stale = 0;
	struct vcpu vcpu;
	char *memory;

	tag_a_page_and_free_it();
	create_vm();
	check(ioctl(vm, KVM_ENABLE_CAP, &mte), "KVM_CAP_ARM_MTE");
	add_code();
	memory = map(SIZE, HUGETLB, -1);
	set_slot(1, DATA, memory, SIZE, 0);
	memset(tags, 0, sizeof(tags));
	if (tags_are_written)
		copy_tags(tags, 4096, KVM_ARM_TAGS_TO_GUEST);
	vcpu = create_vcpu(0);
	run(&vcpu, 0, 0, 0);
	copy_tags(tags, SIZE, KVM_ARM_TAGS_FROM_GUEST);
	for (unsigned long granule = 0; granule < sizeof(tags); granule++)
		stale += tags[granule] != 0;
	printf("%u of %zu tags are of an earlier user%s\n", stale, sizeof(tags),
	       tags_are_written ? ", after user space wrote some" : "");
	set_slot(1, DATA, memory, 0, 0);
	check(munmap(memory, SIZE), "munmap");
	return stale;
}

int main(void)
{
	unsigned int stale;

	if (!(getauxval(AT_HWCAP2) & HWCAP2_MTE)) {
		fprintf(stderr, "the host has no MTE: its kernel needs CONFIG_ARM64_MTE, its emulator mte=on\n");
		return 2;
	}
	run_on_cpu(0);
	reserve_huge_pages(POOL, "1");
	stale = stale_tags(false);
	stale += stale_tags(true);
	return stale ? EXIT_FAILURE : EXIT_SUCCESS;
}
