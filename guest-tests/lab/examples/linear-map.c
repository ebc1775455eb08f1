// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * PID 1 of tests/kernel-boots: prints the memory of the machine and the kernel's dump of its linear map,
 * after boot and after each change of memory by virtio-mem, and loads a module if there is one.
 *
 * Options of the kernel's command line:
 *   changes=N        changes of memory to wait for (0); "waiting for change K" asks for each
 *   modules=N        times that /module.ko is loaded and unloaded (0)
 *   late_kfence=MS   interval with which kfence is enabled after boot (0: it is not)
 */
#define _GNU_SOURCE
#include <sys/syscall.h>

#include "pid1.h"

/* Returns a figure of /proc/meminfo in KiB */
static unsigned long memory(const char *name)
{
	FILE *file = fopen("/proc/meminfo", "r");
	unsigned long value = 0;
	char line[256];

	if (!file)
		fail("/proc/meminfo");
	while (fgets(line, sizeof(line), file))
		if (!strncmp(line, name, strlen(name)))
			value = strtoul(line + strlen(name) + 1, NULL, 10);
	fclose(file);
	return value;
}

/* Returns the free pages of the per-CPU lists in KiB, which MemFree does not include */
static unsigned long listed(void)
{
	FILE *file = fopen("/proc/zoneinfo", "r");
	unsigned long count, pages = 0;
	char line[256];

	if (!file)
		fail("/proc/zoneinfo");
	while (fgets(line, sizeof(line), file))
		if (sscanf(line, " count: %lu", &count) == 1)
			pages += count;
	fclose(file);
	return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* Prints the linear map's lines of the dump; in 5.10 its end is the first mark */
static void print_tables(const char *when)
{
	FILE *file = fopen(DUMP, "r");
	char line[512];

	if (!file)
		fail(DUMP);
	printf("%s: MemTotal %lu\n", when, memory("MemTotal"));
	printf("%s: MemFree %lu\n", when, memory("MemFree"));
	printf("%s: listed %lu\n", when, listed());
	while (fgets(line, sizeof(line), file) && !strcasestr(line, "linear mapping end"))
		if (!strncmp(line, "0xf", 3))
			printf("%s: %s", when, line);
	fclose(file);
	fflush(stdout);
}

/* Waits until memory has changed and stays as it is for two seconds */
static void await_change(int number)
{
	unsigned long before = memory("MemTotal"), now, last = before;
	char when[32];
	int same = 0;

	printf("waiting for change %d\n", number);
	fflush(stdout);
	for (int i = 0; i < 1200 && same < 20; i++) {
		usleep(100000);
		now = memory("MemTotal");
		same = now != before && now == last ? same + 1 : 0;
		last = now;
	}
	if (same < 20) {
		printf("memory has not changed\n");
		end(1);
	}
	sprintf(when, "change %d", number);
	print_tables(when);
}

static void load_module(void)
{
	int fd = open("/module.ko", O_RDONLY);

	if (fd < 0 || syscall(SYS_finit_module, fd, "", 0))
		fail("/module.ko");
	close(fd);
	if (syscall(SYS_delete_module, "test_module", 0))
		fail("delete_module");
}

/* Enables kfence, and waits until it has allocated objects */
static void enable_kfence(int milliseconds)
{
	unsigned long allocated = 0;
	char text[32], line[256];
	FILE *file;

	sprintf(text, "%d", milliseconds);
	write_file("/sys/module/kfence/parameters/sample_interval", text);
	for (int i = 0; i < 600 && allocated < 20; i++) {
		usleep(100000);
		file = fopen("/sys/kernel/debug/kfence/stats", "r");
		if (!file)
			fail("/sys/kernel/debug/kfence/stats");
		while (fgets(line, sizeof(line), file))
			sscanf(line, "total allocations: %lu", &allocated);
		fclose(file);
	}
	if (allocated < 20) {
		printf("kfence has %lu allocations\n", allocated);
		end(1);
	}
	print_tables("kfence");
}

int main(void)
{
	int changes, modules, interval;

	mount_all();
	changes = option("changes=", 0);
	modules = option("modules=", 0);
	interval = option("late_kfence=", 0);
	/* Memory of the boot is freed meanwhile: the initramfs, and what waits for RCU. */
	sleep(2);
	print_tables("boot");
	for (int i = 1; i <= changes; i++)
		await_change(i);
	for (int i = 0; i < modules; i++)
		load_module();
	if (modules) {
		sleep(2);
		print_tables("modules");
	}
	if (interval)
		enable_kfence(interval);
	printf("end\n");
	end(0);
}
