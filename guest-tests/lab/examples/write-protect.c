// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` that compares two ways to save the memory of a guest which runs
// (docs/snapshots.md). The guest has 16 MiB of mapped base pages. With write-protection by userfaultfd
// (Linux 6.10 and newer), step 1 protects them, step 2 reads each of them in the guest, and in step 3 the
// guest writes to each, while a thread saves and unprotects it. With the dirty log, step 4 starts it, steps
// 5 and 6 read and write in the same way, and step 7 reads the log and saves the pages. The guest is
// stopped in steps 1, 4 and 7. Two CPUs.

#include "guest.h"
#include <linux/userfaultfd.h>
#include <sys/syscall.h>
#include "step.h"

#define GUEST_SIZE (16UL << 20)
#define PAGES (GUEST_SIZE / PAGE_SIZE)

static char *memory, *saved;
static int faults;

static struct uffdio_range range(const char *start, size_t length)
{
	return (struct uffdio_range){ .start = (uint64_t)start, .len = length };
}

static void protect(const char *start, size_t length, uint64_t mode)
{
	struct uffdio_writeprotect request = { .range = range(start, length), .mode = mode };

	check(ioctl(faults, UFFDIO_WRITEPROTECT, &request), "UFFDIO_WRITEPROTECT");
}

static void register_memory(void)
{
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP };
	struct uffdio_register request = {
		.range = range(memory, GUEST_SIZE),
		.mode = UFFDIO_REGISTER_MODE_WP,
	};

	faults = (int)check(syscall(SYS_userfaultfd, O_CLOEXEC), "userfaultfd");
	check(ioctl(faults, UFFDIO_API, &api), "UFFDIO_API");
	check(ioctl(faults, UFFDIO_REGISTER, &request), "UFFDIO_REGISTER");
}

static void save_page(unsigned long page)
{
	memcpy(saved + page * PAGE_SIZE, memory + page * PAGE_SIZE, PAGE_SIZE);
}

// Saves each page before its first write.
static void *save_before_writes(void *unused)
{
	struct uffd_msg message;

	run_on_cpu(1);
	for (unsigned long count = 0; count < PAGES; count++) {
		check(read(faults, &message, sizeof(message)) - (long)sizeof(message), "a fault");
		unsigned long page = (message.arg.pagefault.address - (uint64_t)memory) / PAGE_SIZE;

		save_page(page);
		protect(memory + page * PAGE_SIZE, PAGE_SIZE, 0);
	}
	return unused;
}

static void save_logged(void)
{
	static uint64_t log[PAGES / 64];
	struct kvm_dirty_log request = { .slot = 1, .dirty_bitmap = log };

	check(ioctl(vm, KVM_GET_DIRTY_LOG, &request), "KVM_GET_DIRTY_LOG");
	for (unsigned long page = 0; page < PAGES; page++)
		if (log[page / 64] >> page % 64 & 1)
			save_page(page);
}

static void read_pages(const struct vcpu *vcpu)
{
	for (unsigned long page = 0; page < PAGES; page++)
		run(vcpu, page, 0, 0);
}

static void check_saved(char value)
{
	for (size_t page = 0; page < GUEST_SIZE; page += PAGE_SIZE)
		check(saved[page] == value ? 0 : -1, "a page that was saved");
}

int main(void)
{
	struct vcpu vcpu;
	pthread_t thread;

	memory = map_populated(GUEST_SIZE);
	saved = map_populated(GUEST_SIZE);
	run_on_cpu(0);
	create_vm();
	add_code();
	set_slot(1, DATA, memory, GUEST_SIZE, 0);
	vcpu = create_vcpu(0);
	run(&vcpu, 0, 2, PAGES);

	register_memory();
	BEGIN_STEP(1);
	protect(memory, GUEST_SIZE, UFFDIO_WRITEPROTECT_MODE_WP);
	END_STEP();
	BEGIN_STEP(2);
	read_pages(&vcpu);
	END_STEP();
	check(-pthread_create(&thread, NULL, save_before_writes, NULL), "pthread_create");
	BEGIN_STEP(3);
	run(&vcpu, 0, 3, PAGES);
	END_STEP();
	pthread_join(thread, NULL);
	check_saved(2);
	close(faults);
	// The end of the faults unmaps the pages.
	run(&vcpu, 0, 3, PAGES);

	BEGIN_STEP(4);
	set_slot(1, DATA, memory, GUEST_SIZE, KVM_MEM_LOG_DIRTY_PAGES);
	END_STEP();
	BEGIN_STEP(5);
	read_pages(&vcpu);
	END_STEP();
	BEGIN_STEP(6);
	run(&vcpu, 0, 4, PAGES);
	END_STEP();
	BEGIN_STEP(7);
	save_logged();
	END_STEP();
	check_saved(4);
	printf("saved %lu pages twice\n", PAGES);
	return EXIT_SUCCESS;
}
