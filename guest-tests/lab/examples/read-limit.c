// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` that reads more memory in a guest than its memory cgroup may have.
// Four vCPUs read 64 MiB of untouched anonymous memory, with a limit of 24 MiB. With the capability of
// stage2-fault-count the reads allocate memory, which must not start the OOM killer. Arguments: 4k or thp,
// and the number of the capability to enable, if any. It needs CONFIG_MEMCG and four CPUs, and reports the
// peak of the group on Linux 5.19 and newer:
// `scripts/lab workload ./read-limit --base 7.3 --series stage2-fault-count --only stage2-fault-count -v 4
// --seeds 1 --config stage2/linux/config/memory-limit.config -- thp 252`.
//
// Exit code: 0 if the VMM has survived, 1 if it was killed, 2 after an error, and if reads that should
// allocate memory did not.

#include "guest.h"
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define SIZE (64UL << 20)
#define LIMIT "25165824"
// Reads allocate memory until a huge page for each vCPU is left of the limit.
#define MIN_READ (16UL << 20)
#define VCPUS 4
#define PAGES_OF_VCPU (SIZE / PAGE_SIZE / VCPUS)
#define GROUPS "/cgroups"
#define GROUP GROUPS "/vmm"

static void write_file(const char *path, const char *text)
{
	int file = (int)check(open(path, O_WRONLY), path);

	check(write(file, text, strlen(text)), path);
	close(file);
}

static unsigned long read_number(const char *path)
{
	int file = (int)check(open(path, O_RDONLY), path);
	char text[32] = "";

	check(read(file, text, sizeof(text) - 1), path);
	close(file);
	return strtoul(text, NULL, 10);
}

// Limits the memory of this process and its children.
static void enter_group(void)
{
	check(mkdir(GROUPS, 0755), GROUPS);
	check(mount("cgroups", GROUPS, "cgroup2", 0, NULL), "mounting cgroup2");
	write_file(GROUPS "/cgroup.subtree_control", "+memory");
	check(mkdir(GROUP, 0755), GROUP);
	write_file(GROUP "/memory.max", LIMIT);
	write_file(GROUP "/cgroup.procs", "0");
}

struct reader {
	struct vcpu vcpu;
	unsigned long index;
	pthread_t thread;
};

static void *read_part(void *argument)
{
	const struct reader *reader = argument;
	unsigned long first = reader->index * PAGES_OF_VCPU;

	run_on_cpu((int)reader->index);
	for (unsigned long page = first; page < first + PAGES_OF_VCPU; page++)
		run(&reader->vcpu, page, 0, 0);
	return NULL;
}

// The VMM: returns its exit code.
static int read_all(int advice, unsigned int capability)
{
	struct kvm_enable_cap enable = { .cap = capability };
	struct reader readers[VCPUS];
	unsigned long held;
	char *data = map_aligned(SIZE);

	check(madvise(data, SIZE, advice), "madvise");
	create_vm();
	if (capability)
		check(ioctl(vm, KVM_ENABLE_CAP, &enable), "KVM_ENABLE_CAP");
	add_code();
	set_slot(1, DATA, data, SIZE, 0);
	for (unsigned long index = 0; index < VCPUS; index++)
		readers[index] = (struct reader){ create_vcpu(index), index, 0 };
	for (int index = 0; index < VCPUS; index++)
		check(-pthread_create(&readers[index].thread, NULL, read_part, &readers[index]),
		      "pthread_create");
	for (int index = 0; index < VCPUS; index++)
		pthread_join(readers[index].thread, NULL);
	held = read_number(GROUP "/memory.current");
	printf("the group has %lu KiB after the reads\n", held >> 10);
	fflush(stdout);
	return capability && held < MIN_READ ? 2 : EXIT_SUCCESS;
}

int main(int count, char **arguments)
{
	int advice = count > 1 && !strcmp(arguments[1], "thp") ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
	unsigned int capability = count > 2 ? (unsigned int)strtoul(arguments[2], NULL, 10) : 0;
	int status;
	pid_t vmm;

	enter_group();
	vmm = (pid_t)check(fork(), "fork");
	if (vmm == 0)
		exit(read_all(advice, capability));
	check(waitpid(vmm, &status, 0), "waitpid");
	printf("status %#x\n", (unsigned int)status);
	if (access(GROUP "/memory.peak", R_OK) == 0)
		printf("peak of the group %lu KiB\n", read_number(GROUP "/memory.peak") >> 10);
	if (WIFSIGNALED(status))
		return WTERMSIG(status) == SIGKILL ? 1 : 2;
	return WEXITSTATUS(status);
}
