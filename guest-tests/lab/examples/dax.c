// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` and `granule lab check` whose guest has 16M of a file on
// persistent memory (DAX), which the host maps by blocks of 2M. Needs dax.config, a device
// /dev/pmem0 (pmem-qemu), and a file system for it beside the program (/workload/image, whose
// clusters have 2M). A vCPU reads all pages (step 1) and writes to all (step 2).
//
// Exit code: 0 if host and guest read what the other wrote, 1 if not, 2 after an error.

#include "guest.h"
#include "step.h"

#include <sys/mount.h>
#include <sys/stat.h>

#define SIZE (16UL << 20)
#define PAGES (SIZE / PAGE_SIZE)
#define DEVICE "/dev/pmem0"
#define FOLDER "/tmp/dax"

// Writes the parts of the image that are not zero to the device, whose memory is.
static void copy_image(void)
{
	static const char zeros[PAGE_SIZE];
	static char page[PAGE_SIZE];
	int image = (int)check(open("/workload/image", O_RDONLY), "/workload/image");
	int device = (int)check(open(DEVICE, O_WRONLY), DEVICE);
	off_t at = 0;

	while (check(pread(image, page, PAGE_SIZE, at), "image") == PAGE_SIZE) {
		if (memcmp(page, zeros, PAGE_SIZE))
			check(pwrite(device, page, PAGE_SIZE, at) == PAGE_SIZE ? 0 : -1, DEVICE);
		at += PAGE_SIZE;
	}
	check(fsync(device), DEVICE);
	close(device);
	close(image);
}

// Maps a file of the device at a multiple of its size.
static char *map_file(void)
{
	char *memory = map_aligned(SIZE);
	int file;

	check(mkdir(FOLDER, 0700), FOLDER);
	check(mount(DEVICE, FOLDER, "ext4", 0, "dax=always"), "mount");
	file = (int)check(open(FOLDER "/memory", O_RDWR | O_CREAT, 0600), "file");
	check(fallocate(file, 0, 0, SIZE), "fallocate");
	check(mmap(memory, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC | MAP_FIXED, file, 0) ==
	      memory ? 0 : -1, "mmap of the file");
	return memory;
}

int main(void)
{
	unsigned int wrong = 0;
	struct vcpu vcpu;
	char *memory;

	run_on_cpu(0);
	copy_image();
	memory = map_file();
	for (uint64_t page = 0; page < PAGES; page++)
		*(uint64_t *)(memory + page * PAGE_SIZE) = page;
	create_vm();
	add_code();
	set_slot(1, DATA, memory, SIZE, 0);
	vcpu = create_vcpu(0);
	BEGIN_STEP(1);
	for (uint64_t page = 0; page < PAGES; page++) {
		run(&vcpu, page, 0, 0);
		// The guest stores what it has read.
		wrong += *(uint64_t *)vcpu.run->mmio.data != page;
	}
	END_STEP();
	BEGIN_STEP(2);
	run(&vcpu, 0, 7, PAGES);
	END_STEP();
	for (uint64_t page = 0; page < PAGES; page++)
		wrong += *(const volatile uint64_t *)(memory + page * PAGE_SIZE) != 7;
	printf("%u pages have another value\n", wrong);
	return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
