// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Load for a kernel whose linear map has blocks, as PID 1 or as a program: changes permissions of
 * single pages by secret memory and BPF programs, frees these, and prints how the linear map is
 * mapped.
 *
 * Options of the kernel's command line:
 *   count=N   secret pages and BPF programs (512)
 *   secrets=0 no secret pages
 *   programs=0  no BPF programs
 *   length=N  instructions of a BPF program (64)
 *   procs=N   processes that do it at once, each its part (1)
 *   rounds=N  times that each of several processes does it (1)
 *   hold=MIB  memory that is allocated before and after the secret memory (0)
 *   fragment=MIB  memory of which every other 64K is freed before BPF programs are loaded (0)
 *   dump=1    print the dump of the linear map each time
 */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "pid1.h"

#define MAX_COUNT 4096
#define MAX_LENGTH 4096
#define SYS_MEMFD_SECRET 447

static int secret_fd[MAX_COUNT], socket_fd[MAX_COUNT];
static char *secret[MAX_COUNT];

static void print_lines(const char *path, const char *const *names)
{
	FILE *file = fopen(path, "r");
	char line[512];

	if (!file)
		fail(path);
	while (fgets(line, sizeof(line), file))
		for (int i = 0; names[i]; i++)
			if (!strncmp(line, names[i], strlen(names[i])))
				fputs(line, stdout);
	fclose(file);
}

/* Prints the size of the linear map that each kind of leaf maps */
static void print_leaves(const char *when, int whole)
{
	unsigned long long start, end, size, pages = 0, cont_pages = 0, pmds = 0, cont_pmds = 0;
	unsigned long long puds = 0, invalid = 0;
	FILE *file = fopen(DUMP, "r");
	char line[512], unit;
	int linear = 0;

	if (!file)
		fail(DUMP);
	while (fgets(line, sizeof(line), file)) {
		if (strstr(line, "---["))
			linear = !!strcasestr(line, "linear mapping start");
		if (!linear ||
		    sscanf(line, "0x%llx-0x%llx %llu%c", &start, &end, &size, &unit) != 4)
			continue;
		if (whole)
			fputs(line, stdout);
		/* Leaves have attributes, holes have none. */
		if (!strstr(line, " AF"))
			continue;
		size = (end - start) >> 10;
		if (strstr(line, " PTE "))
			*(strstr(line, " CON ") ? &cont_pages : &pages) += size;
		else if (strstr(line, " PMD "))
			*(strstr(line, " CON ") ? &cont_pmds : &pmds) += size;
		else
			puds += size;
		if (strstr(line, " F "))
			invalid += size;
	}
	fclose(file);
	printf("%s: KiB by pages %llu, contiguous pages %llu, PMDs %llu, contiguous PMDs %llu, "
	       "PUDs %llu; invalid %llu\n",
	       when, pages, cont_pages, pmds, cont_pmds, puds, invalid);
	fflush(stdout);
}

static void map_secrets(int count)
{
	if (!option("secrets=", 1))
		return;
	for (int i = 0; i < count; i++) {
		secret_fd[i] = syscall(SYS_MEMFD_SECRET, 0);
		if (secret_fd[i] < 0 || ftruncate(secret_fd[i], 4096))
			fail("memfd_secret");
		secret[i] = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, secret_fd[i], 0);
		if (secret[i] == MAP_FAILED)
			fail("mmap");
		secret[i][0] = i;
	}
}

static void unmap_secrets(int count)
{
	for (int i = 0; i < count && secret[i]; i++) {
		if (secret[i][0] != (char)i) {
			printf("secret page %d has changed\n", i);
			end(1);
		}
		munmap(secret[i], 4096);
		close(secret_fd[i]);
	}
}

static void hold_memory(size_t mebibytes)
{
	if (mebibytes && mmap(NULL, mebibytes << 20, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0) == MAP_FAILED)
		fail("mmap");
}

/* Frees every other 64K, so that no block is free */
static void fragment_memory(size_t mebibytes)
{
	char *memory;

	if (!mebibytes)
		return;
	memory = mmap(NULL, mebibytes << 20, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (memory == MAP_FAILED)
		fail("mmap");
	for (size_t at = 0; at < mebibytes << 20; at += 1 << 17)
		munmap(memory + at, 1 << 16);
}

static void load_programs(int count)
{
	static struct sock_filter code[MAX_LENGTH];
	int length = option("length=", 64);
	struct sock_fprog program = { length, code };

	if (!option("programs=", 1))
		return;
	if (length < 1 || length > MAX_LENGTH)
		fail("length=");
	for (int i = 0; i < length - 1; i++)
		code[i] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_IMM, i);
	code[length - 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, -1);
	for (int i = 0; i < count; i++) {
		socket_fd[i] = socket(AF_UNIX, SOCK_DGRAM, 0);
		if (socket_fd[i] < 0 || setsockopt(socket_fd[i], SOL_SOCKET, SO_ATTACH_FILTER,
						   &program, sizeof(program)))
			fail("SO_ATTACH_FILTER");
	}
}

static void free_programs(int count)
{
	for (int i = 0; i < count; i++)
		if (socket_fd[i])
			close(socket_fd[i]);
}

static void run_process(int count, int rounds, int reads_dump)
{
	const char *const switches[] = { "voluntary_ctxt_switches", NULL };
	static char buffer[1 << 16];

	while (rounds--) {
		map_secrets(count);
		load_programs(count);
		if (reads_dump) {
			FILE *file = fopen(DUMP, "r");

			while (file && fread(buffer, 1, sizeof(buffer), file))
				;
			if (file)
				fclose(file);
		}
		unmap_secrets(count);
		free_programs(count);
	}
	print_lines("/proc/self/status", switches);
	fflush(stdout);
	_exit(0);
}

int main(void)
{
	const char *const memory[] = { "MemTotal", "MemFree", NULL };
	const struct rlimit files = { 2 * MAX_COUNT + 16, 2 * MAX_COUNT + 16 };
	int count, procs, rounds, status, whole;

	if (getpid() == 1)
		mount_all();
	setrlimit(RLIMIT_NOFILE, &files);
	count = option("count=", 512);
	procs = option("procs=", 1);
	rounds = option("rounds=", 1);
	whole = option("dump=", 0);
	if (count > MAX_COUNT || procs < 1)
		fail("count= or procs=");
	print_lines("/proc/meminfo", memory);
	print_leaves("boot", whole);
	if (procs > 1) {
		asm volatile("hint #0x61");
		for (int i = 0; i < procs; i++)
			if (!fork())
				run_process(count / procs, rounds, i == 0);
		while (wait(&status) > 0)
			if (status)
				fail("a process");
	} else {
		/* Marks that begin segments of the plugin's counts */
		hold_memory(option("hold=", 0));
		asm volatile("hint #0x61");
		map_secrets(count);
		hold_memory(option("hold=", 0));
		fragment_memory(option("fragment=", 0));
		asm volatile("hint #0x62");
		load_programs(count);
		asm volatile("hint #0x63");
		print_leaves("load", whole);
		asm volatile("hint #0x64");
		unmap_secrets(count);
		asm volatile("hint #0x65");
		free_programs(count);
	}
	/* The kernel frees BPF programs and their memory later. */
	sleep(2);
	asm volatile("hint #0x66");
	print_leaves("freed", whole);
	print_lines("/proc/meminfo", memory);
	printf("end\n");
	end(0);
}
