// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` that measures faults of a guest while other memory of it is
// returned to the host (stage2/linux/7.3/notifier-range). A vCPU writes to each page of 16 MiB that the
// host has populated: in step 1 alone, in step 2, in another VM, while a thread discards 256 MiB that
// the guest has not touched, as a balloon or a memory device does.

#include "guest.h"
#include "step.h"

#define GUEST_SIZE (16UL << 20)
#define OTHER_SIZE (256UL << 20)

static char *other;
static pthread_barrier_t start;

static void *discard_other(void *unused)
{
	run_on_cpu(1);
	pthread_barrier_wait(&start);
	check(madvise(other, OTHER_SIZE, MADV_DONTNEED), "MADV_DONTNEED");
	return unused;
}

static struct vcpu create_guest(void)
{
	create_vm();
	add_code();
	set_slot(1, DATA, map_populated(GUEST_SIZE), GUEST_SIZE, 0);
	return create_vcpu(0);
}

int main(void)
{
	struct vcpu vcpu = create_guest();
	pthread_t thread;

	run_on_cpu(0);
	// The first run also takes the faults of the code.
	run(&vcpu, 0, 1, 1);
	BEGIN_STEP(1);
	run(&vcpu, 1, 1, GUEST_SIZE / PAGE_SIZE - 1);
	END_STEP();

	vcpu = create_guest();
	run(&vcpu, 0, 1, 1);
	other = map_populated(OTHER_SIZE);
	set_slot(2, DATA + GUEST_SIZE, other, OTHER_SIZE, 0);
	check(-pthread_barrier_init(&start, NULL, 2), "pthread_barrier_init");
	check(-pthread_create(&thread, NULL, discard_other, NULL), "pthread_create");
	pthread_barrier_wait(&start);
	BEGIN_STEP(2);
	run(&vcpu, 1, 1, GUEST_SIZE / PAGE_SIZE - 1);
	END_STEP();
	pthread_join(thread, NULL);
	printf("wrote %lu pages alone and beside a discard\n", GUEST_SIZE / PAGE_SIZE - 1);
	return EXIT_SUCCESS;
}
