// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program for `granule lab workload` that measures how fast a restored guest answers
// (docs/snapshots.md). In the host it boots the guest, saves it once the guest is ready, and restores it
// once for each value of `granule run --restore` without the directory: a step lasts from the start
// of granule to the guest's answer. As PID 1 of the guest it is the service: it fills its memory,
// and answers a line of input when it has read a part of it. With `pause` as the VALUE it pauses the guest
// instead, and checks that the guest's clock stands still.
//
// usage: restore BACKING RUN VALUE…     BACKING of the guest's memory, such as 4k; the service reads
//                                       RUN adjacent pages at a time; 1 to 8 VALUEs: ,memory=map

#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#include "pid1.h"
#include "step.h"

#define SERVICE_BYTES (96UL << 20)
#define ANSWER_PAGES 4096
#define SOCKET "/tmp/vm.sock"
#define SAVED "/tmp/saved"

static void begin_step(int number)
{
	// The number of a mark is part of its instruction.
	switch (number) {
	case 1: BEGIN_STEP(1); break;
	case 2: BEGIN_STEP(2); break;
	case 3: BEGIN_STEP(3); break;
	case 4: BEGIN_STEP(4); break;
	case 5: BEGIN_STEP(5); break;
	case 6: BEGIN_STEP(6); break;
	case 7: BEGIN_STEP(7); break;
	case 8: BEGIN_STEP(8); break;
	}
}

static long clock_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// Answers `t` with the time, and each other line of input when it has read 16 MiB all over its memory.
static void serve(void)
{
	uint64_t *memory, page_words = (uint64_t)sysconf(_SC_PAGESIZE) / 8;
	uint64_t pages = SERVICE_BYTES / 8 / page_words, run, at, i;
	char byte;

	mount_all();
	run = (uint64_t)option("run=", 1);
	memory = mmap(NULL, SERVICE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		fail("mmap");
	for (i = 0; i < SERVICE_BYTES / 8; i++)
		memory[i] = i;
	printf("ready\n");
	fflush(stdout);
	while (read(0, &byte, 1) == 1) {
		if (byte == 't') {
			printf("time %ld\n", clock_ms());
			fflush(stdout);
			// The end of the line.
			if (read(0, &byte, 1) != 1)
				break;
			continue;
		}
		// A prime factor visits each run once, in a fixed order that is not ascending.
		for (i = 0; i < ANSWER_PAGES; i++) {
			at = i / run * 7919 % (pages / run) * run + i % run;
			at = at * page_words + i % page_words;
			if (memory[at] != at) {
				printf("memory differs\n");
				end(1);
			}
		}
		printf("answer\n");
		fflush(stdout);
	}
	end(0);
}

static pid_t vmm;
static int input, output;

// Starts granule with pipes as its standard input and output.
static void start(const char *const arguments[])
{
	int in[2], out[2];

	if (pipe(in) || pipe(out))
		fail("pipe");
	vmm = fork();
	if (vmm < 0)
		fail("fork");
	if (vmm == 0) {
		dup2(in[0], 0);
		dup2(out[1], 1);
		close(in[1]);
		close(out[0]);
		execv(arguments[0], (char *const *)arguments);
		_exit(127);
	}
	close(in[0]);
	close(out[1]);
	input = in[1];
	output = out[0];
}

// Reads the guest's output until it contains `text`, whose first byte occurs in it only once.
static void wait_for(const char *text)
{
	const char *next = text;
	char byte;

	while (*next) {
		if (read(output, &byte, 1) != 1) {
			fprintf(stderr, "granule ended before '%s'\n", text);
			exit(1);
		}
		next = byte == *next ? next + 1 : byte == *text ? text + 1 : text;
	}
}

static void stop(void)
{
	int status;

	kill(vmm, SIGTERM);
	close(input);
	if (waitpid(vmm, &status, 0) != vmm || WIFSIGNALED(status))
		fprintf(stderr, "granule: status %#x\n", status);
	close(output);
	unlink(SOCKET);
}

// Sends a request without a body, and prints the answer.
static void post(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = SOCKET };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	char text[512];
	ssize_t n;

	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)))
		fail(SOCKET);
	n = snprintf(text, sizeof(text), "POST %s HTTP/1.1\r\nHost: vm\r\nConnection: close\r\n\r\n", path);
	if (write(fd, text, (size_t)n) != n)
		fail("write");
	while ((n = read(fd, text, sizeof(text))) > 0)
		fwrite(text, 1, (size_t)n, stdout);
	printf("\n");
	fflush(stdout);
	close(fd);
}

static long guest_ms(void)
{
	char digits[16] = { 0 };

	if (write(input, "t\n", 2) != 2)
		fail("write");
	wait_for("time ");
	for (size_t i = 0; i < sizeof(digits) - 1 && read(output, &digits[i], 1) == 1 && digits[i] > ' '; i++)
		;
	return atol(digits);
}

// Pauses the guest for two seconds, in which its clock must stand still.
static void check_pause(void)
{
	long before = guest_ms(), after;

	post("/v1/pause");
	sleep(2);
	post("/v1/resume");
	after = guest_ms();
	printf("the guest's clock has gone on by %ld ms\n", after - before);
	if (after < before || after - before > 1000)
		exit(1);
}

int main(int count, char **values)
{
	char memory[64], command_line[64], value[256];
	const char *boot[] = { "/workload/granule", "run", "--kernel", "/workload/Image", "--initrd",
			       "/workload/guest.cpio", "--memory", memory, "--serial", "pl011",
			       "--cmdline", command_line, "--no-reboot", "--api-socket", SOCKET,
			       "--snapshot", SAVED, NULL };

	if (getpid() == 1)
		serve();
	if (count < 4 || count > 11) {
		fprintf(stderr, "usage: restore BACKING RUN VALUE… (1 to 8), such as 4k 1 ,memory=map\n");
		return 2;
	}
	snprintf(memory, sizeof(memory), "256M,backing=%s", values[1]);
	snprintf(command_line, sizeof(command_line), "console=ttyAMA0 quiet run=%d", atoi(values[2]));
	start(boot);
	wait_for("ready");
	if (strcmp(values[3], "pause") == 0) {
		check_pause();
		stop();
		return 0;
	}
	post("/v1/snapshot");
	stop();
	for (int i = 3; i < count; i++) {
		snprintf(value, sizeof(value), SAVED "%s", values[i]);
		const char *restore[] = { "/workload/granule", "run", "--restore", value, NULL };

		begin_step(i - 2);
		start(restore);
		if (write(input, "\n", 1) != 1)
			fail("write");
		wait_for("answer");
		END_STEP();
		stop();
	}
	return 0;
}
