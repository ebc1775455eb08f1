// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * PID 1 that unmaps memory in ways that batches and contiguous blocks must
 * survive, for tests/kernel-boots. A thread on another CPU accesses pages
 * whose block was unfolded, and then each is discarded by itself: both CPUs
 * must read zeros. Processes then map, protect, lock, discard, fork and unmap
 * memory at random, and threads access what another thread discards. Contents
 * are compared with a copy; seeds are fixed.
 *
 * Option of the kernel's command line:
 *   rounds=N   repetitions of each part, in hundreds for the random ones (20)
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "pid1.h"

#define HUGE (2UL << 20)
#define PROCESSES 6
#define THREADS 4

static size_t page;
static unsigned char *shared;
static atomic_int turn;

static unsigned char *map_huge(size_t size)
{
	unsigned char *at = mmap(NULL, size + HUGE, PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		fail("mmap");
	return (unsigned char *)(((uintptr_t)at + HUGE - 1) & ~(HUGE - 1));
}

static void discard(unsigned char *at, size_t size)
{
	if (madvise(at, size, MADV_DONTNEED))
		fail("madvise");
}

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu % sysconf(_SC_NPROCESSORS_ONLN), &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		fail("sched_setaffinity");
}

static void await_turn(int value)
{
	while (atomic_load(&turn) < value)
		sched_yield();
}

/* Accesses the odd pages of a block, and reads zeros from all when they are discarded */
static void *access_block(void *blocks)
{
	volatile unsigned char *at = shared;
	size_t i, block = 16 * page;

	pin(1);
	for (intptr_t n = 0; n < (intptr_t)blocks; n++, at += block) {
		await_turn(3 * n + 1);
		for (i = 1; i < 16; i += 2)
			if (!at[i * page])
				fail("a page was lost");
		atomic_store(&turn, 3 * n + 2);
		await_turn(3 * n + 3);
		for (i = 0; i < 16; i++)
			if (at[i * page])
				fail("a stale page");
	}
	return NULL;
}

static void check_stale(int rounds)
{
	size_t block = 16 * page, i;
	intptr_t blocks = HUGE / block, n;

	pin(0);
	while (rounds--) {
		pthread_t thread;
		unsigned char *at = shared = map_huge(HUGE);

		for (i = 0; i < HUGE; i += page)
			at[i] = 1;
		/* A huge page becomes contiguous blocks. */
		mprotect(at, page, PROT_READ);
		mprotect(at, page, PROT_READ | PROT_WRITE);
		atomic_store(&turn, 0);
		if (pthread_create(&thread, NULL, access_block, (void *)blocks))
			fail("pthread_create");
		for (n = 0; n < blocks; n++, at += block) {
			discard(at, page);
			atomic_store(&turn, 3 * n + 1);
			await_turn(3 * n + 2);
			for (i = 1; i < 16; i++)
				discard(at + i * page, page);
			atomic_store(&turn, 3 * n + 3);
			for (i = 0; i < 16; i++)
				if (((volatile unsigned char *)at)[i * page])
					fail("a stale page");
		}
		pthread_join(thread, NULL);
		munmap(shared, HUGE);
	}
}

static void compare(const unsigned char *at, const unsigned char *copy, size_t pages)
{
	for (size_t i = 0; i < pages; i++)
		if (at[i * page] != copy[i])
			fail("contents differ");
}

static void change_at_random(unsigned int seed, int rounds)
{
	size_t size = 2 * HUGE, pages = size / page;
	unsigned char *copy = calloc(pages, 1), *at = map_huge(size);
	int status;

	if (!copy)
		fail("calloc");
	while (rounds--) {
		size_t first = rand_r(&seed) % pages, i;
		size_t count = 1 + rand_r(&seed) % (rand_r(&seed) % 4 ? 40 : pages);

		count = count < pages - first ? count : pages - first;
		switch (rand_r(&seed) % 8) {
		case 0 ... 2:
			for (i = first; i < first + count; i++)
				at[i * page] = copy[i] = 1 + rand_r(&seed) % 255;
			break;
		case 3 ... 4:
			discard(at + first * page, count * page);
			memset(copy + first, 0, count);
			break;
		case 5:
			mprotect(at + first * page, count * page, PROT_READ);
			compare(at, copy, pages);
			mprotect(at + first * page, count * page, PROT_READ | PROT_WRITE);
			break;
		case 6:
			if (!mlock(at + first * page, count * page))
				munlock(at + first * page, count * page);
			break;
		case 7:
			if (!fork()) {
				at[first * page]++;
				discard(at + first * page, count * page);
				memset(copy + first, 0, count);
				compare(at, copy, pages);
				_exit(0);
			}
			while (wait(&status) > 0)
				if (status)
					fail("a child");
			break;
		}
		if (rounds % 64 == 0) {
			compare(at, copy, pages);
			munmap(at, size);
			at = map_huge(size);
			memset(copy, 0, pages);
		}
	}
}

static void *access_at_random(void *number)
{
	unsigned int seed = (intptr_t)number;

	pin(seed);
	for (int i = 0; i < 20000; i++) {
		size_t at = rand_r(&seed) % (HUGE / page) * page;
		unsigned char value;

		if (seed % 16 == 0)
			discard(shared + at, page);
		else if (seed % 16 < 8)
			shared[at] = 7;
		value = ((volatile unsigned char *)shared)[at];
		if (value && value != 7)
			fail("a foreign value");
	}
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	int rounds, status;

	if (getpid() == 1)
		mount_all();
	page = sysconf(_SC_PAGESIZE);
	write_file("/sys/kernel/mm/transparent_hugepage/enabled", "always");
	write_file("/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled", "always");
	rounds = option("rounds=", 20);
	check_stale(rounds);
	printf("discarded: no stale page\n");
	for (int i = 0; i < PROCESSES; i++)
		if (!fork()) {
			change_at_random(i, 100 * rounds);
			fflush(stdout);
			_exit(0);
		}
	while (wait(&status) > 0)
		if (status)
			fail("a process");
	printf("changed: contents are right\n");
	shared = map_huge(HUGE);
	for (intptr_t i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, access_at_random, (void *)(i + 1)))
			fail("pthread_create");
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	printf("accessed: no foreign value\nend\n");
	end(0);
}
