// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A VM of the example programs: vCPUs that write or read pages, with a stage-1 table that maps all
 * memory cacheable. Errors of calls end the program with exit code 2.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE_SIZE 4096UL

// Guest addresses: code and stage-1 table, data, and an address without memory, which ends a run.
#define CODE 0x40000000UL
#define TABLE (CODE + PAGE_SIZE)
#define DATA 0x80000000UL
#define DOORBELL 0x09000000UL

// Writes x1 to x5 pages from x0 on or, if x5 is 0, reads a page; then exits by a store to x3.
extern char guest_start[], guest_end[];
__asm__(".pushsection .rodata\n"
	".globl guest_start, guest_end\n"
	".balign 8\n"
	"guest_start:\n"
	"1: cbz x5, 3f\n"
	"2: str x1, [x0]\n"
	"   add x0, x0, x2\n"
	"   subs x5, x5, #1\n"
	"   b.ne 2b\n"
	"   b 4f\n"
	"3: ldr x1, [x0]\n"
	"4: str x1, [x3]\n"
	"   b 1b\n"
	"guest_end:\n"
	".popsection");

struct vcpu {
	int fd;
	struct kvm_run *run;
};

static int kvm, vm;

static long check(long result, const char *operation)
{
	if (result < 0) {
		perror(operation);
		exit(2);
	}
	return result;
}

static char *map(size_t size, int flags, int fd)
{
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);

	check(memory == MAP_FAILED ? -1 : 0, "mmap");
	return memory;
}

// Maps anonymous memory at a multiple of its size, so that huge pages fit.
static inline char *map_aligned(size_t size)
{
	uint64_t start = (uint64_t)map(2 * size, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	return (char *)((start + size - 1) & ~(size - 1));
}

// Maps anonymous memory by base pages, which exist afterwards.
static inline char *map_populated(size_t size)
{
	char *memory = map(size, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	check(madvise(memory, size, MADV_NOHUGEPAGE), "MADV_NOHUGEPAGE");
	for (size_t page = 0; page < size; page += PAGE_SIZE)
		memory[page] = 1;
	return memory;
}

// Reserves hugetlb pages of the pool whose file is given.
static inline void reserve_huge_pages(const char *pool, const char *count)
{
	int fd = (int)check(open(pool, O_WRONLY), pool);

	check(write(fd, count, strlen(count)), pool);
	close(fd);
}

static void set_register(const struct vcpu *vcpu, uint64_t id, uint64_t value)
{
	struct kvm_one_reg reg = { .id = id, .addr = (uint64_t)&value };

	check(ioctl(vcpu->fd, KVM_SET_ONE_REG, &reg), "KVM_SET_ONE_REG");
}

#define CORE_REGISTER(field) \
	(KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE | KVM_REG_ARM_CORE_REG(field))

static struct vcpu create_vcpu(unsigned long id)
{
	struct kvm_vcpu_init target;
	struct vcpu vcpu;

	check(ioctl(vm, KVM_ARM_PREFERRED_TARGET, &target), "KVM_ARM_PREFERRED_TARGET");
	vcpu.fd = (int)check(ioctl(vm, KVM_CREATE_VCPU, id), "KVM_CREATE_VCPU");
	check(ioctl(vcpu.fd, KVM_ARM_VCPU_INIT, &target), "KVM_ARM_VCPU_INIT");
	vcpu.run = (void *)map((size_t)check(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0),
					     "KVM_GET_VCPU_MMAP_SIZE"), MAP_SHARED, vcpu.fd);
	set_register(&vcpu, CORE_REGISTER(regs.pc), CODE);
	set_register(&vcpu, CORE_REGISTER(regs.regs[2]), PAGE_SIZE);
	set_register(&vcpu, CORE_REGISTER(regs.regs[3]), DOORBELL);
	// MAIR_EL1, TCR_EL1 (39 bits, 4K, cacheable walks), TTBR0_EL1, SCTLR_EL1 (M, C, I).
	set_register(&vcpu, ARM64_SYS_REG(3, 0, 10, 2, 0), 0xff);
	set_register(&vcpu, ARM64_SYS_REG(3, 0, 2, 0, 2),
		     25 | 1 << 8 | 1 << 10 | 3 << 12 | 1 << 23 | 2UL << 32);
	set_register(&vcpu, ARM64_SYS_REG(3, 0, 2, 0, 0), TABLE);
	set_register(&vcpu, ARM64_SYS_REG(3, 0, 1, 0, 0), 0x30d00800 | 1 << 0 | 1 << 2 | 1 << 12);
	return vcpu;
}

static void run(const struct vcpu *vcpu, unsigned long first_page, uint64_t value, uint64_t pages)
{
	set_register(vcpu, CORE_REGISTER(regs.regs[0]), DATA + first_page * PAGE_SIZE);
	set_register(vcpu, CORE_REGISTER(regs.regs[1]), value);
	set_register(vcpu, CORE_REGISTER(regs.regs[5]), pages);
	check(ioctl(vcpu->fd, KVM_RUN, 0), "KVM_RUN");
	if (vcpu->run->exit_reason != KVM_EXIT_MMIO || vcpu->run->mmio.phys_addr != DOORBELL) {
		fprintf(stderr, "unexpected exit %u\n", vcpu->run->exit_reason);
		exit(2);
	}
}

static void set_slot(unsigned int slot, uint64_t address, char *memory, uint64_t size,
		     unsigned int flags)
{
	struct kvm_userspace_memory_region region = {
		.slot = slot,
		.flags = flags,
		.guest_phys_addr = address,
		.memory_size = size,
		.userspace_addr = (uint64_t)memory,
	};

	check(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region), "KVM_SET_USER_MEMORY_REGION");
}

static void create_vm(void)
{
	kvm = (int)check(open("/dev/kvm", O_RDWR), "/dev/kvm");
	vm = (int)check(ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");
}

// Adds the memory with the code and the stage-1 table of all vCPUs.
static void add_code(void)
{
	char *code = map(2 * PAGE_SIZE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	uint64_t *table = (uint64_t *)(code + PAGE_SIZE);

	// Blocks of 1 GiB: AF, inner shareable, attribute 0.
	for (uint64_t entry = 0; entry < 4; entry++)
		table[entry] = entry << 30 | 0x701;
	memcpy(code, guest_start, (size_t)(guest_end - guest_start));
	set_slot(0, CODE, code, 2 * PAGE_SIZE, 0);
}

static void run_on_cpu(int cpu)
{
	cpu_set_t cpus;

	CPU_ZERO(&cpus);
	CPU_SET(cpu, &cpus);
	check(sched_setaffinity(0, sizeof(cpus), &cpus), "sched_setaffinity");
}
