// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` that measures faults on memory which the host keeps while its
// stage-2 mappings go (stage2/linux/7.3/fault-around). A vCPU writes to each page of 16 MiB that the
// host has populated: in step 1 for the first time, in step 2 after the memslot was deleted and added
// again, in step 3 after the host has protected the memory from writes and allowed them again.

#include "guest.h"
#include "step.h"

#define GUEST_SIZE (16UL << 20)
#define PAGES (GUEST_SIZE / PAGE_SIZE)

int main(void)
{
	char *memory = map_populated(GUEST_SIZE);
	struct vcpu vcpu;

	run_on_cpu(0);
	create_vm();
	add_code();
	set_slot(1, DATA, memory, GUEST_SIZE, 0);
	vcpu = create_vcpu(0);

	BEGIN_STEP(1);
	run(&vcpu, 0, 1, PAGES);
	END_STEP();

	set_slot(1, DATA, memory, 0, 0);
	set_slot(1, DATA, memory, GUEST_SIZE, 0);
	BEGIN_STEP(2);
	run(&vcpu, 0, 2, PAGES);
	END_STEP();

	check(mprotect(memory, GUEST_SIZE, PROT_READ), "mprotect");
	check(mprotect(memory, GUEST_SIZE, PROT_READ | PROT_WRITE), "mprotect");
	BEGIN_STEP(3);
	run(&vcpu, 0, 3, PAGES);
	END_STEP();

	for (size_t page = 0; page < GUEST_SIZE; page += PAGE_SIZE)
		check(memory[page] == 3 ? 0 : -1, "a page that the guest has written");
	printf("wrote %lu pages three times\n", PAGES);
	return EXIT_SUCCESS;
}
