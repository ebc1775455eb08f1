/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * An arm64 kernel image that powers off at once, so that a run of a VMM is little more than its start:
 *
 *	aarch64-linux-gnu-gcc -c -o power-off.o power-off.S
 *	aarch64-linux-gnu-objcopy -O binary power-off.o Image && truncate -s 9600K Image
 */

	b	start
	.long	0
	.quad	0			// text offset
	.quad	9600 << 10		// size of the image
	.quad	0xa			// little endian, 4K pages, anywhere in memory
	.quad	0, 0, 0
	.ascii	"ARM\x64"
	.long	0
start:
	ldr	w0, =0x84000008		// PSCI SYSTEM_OFF
	hvc	#0
	b	.
