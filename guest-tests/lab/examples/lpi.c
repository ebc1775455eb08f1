// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest without an operating system that uses the ITS: it maps an LPI, makes it pending by the command
 * INT, waits 1 s, in which a snapshot can be taken, and then has to receive it, and again after another INT.
 * It prints the interrupts, and powers off:
 *
 *	aarch64-linux-gnu-gcc -O2 -ffreestanding -fno-toplevel-reorder -fno-asynchronous-unwind-tables -fno-pic \
 *		-mgeneral-regs-only -mstrict-align -nostdlib -static -Wl,-Ttext=0,-e,run,--build-id=none -o lpi lpi.c
 *	aarch64-linux-gnu-objcopy -O binary lpi Image
 *	granule run --kernel Image --memory 64M --vcpus 1 --cmdline ''
 *
 * Addresses are those of `granule run` (vmm/src/arch/aarch64/boot/mod.rs), commands and registers those of
 * Arm IHI 0069. The MMU is off, so the host sees the tables in emulation or with FEAT_S2FWB.
 */

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;

#define ITS	  0x08080000ul
#define SERIAL	  0x09000000ul
#define GICR	  0x10000000ul
#define GICD	  0x08000000ul
#define MEMORY	  0x40000000ul
/* Tables, each of 64K, behind the image and before the device tree, which is at the end of memory. */
#define TABLE(n)  (MEMORY + (32ul << 20) + (n) * 0x10000ul)
#define DEVICES	  TABLE(0)
#define COLLECTIONS TABLE(1)
#define COMMANDS  TABLE(2)
#define EVENTS	  TABLE(3)
#define PROPERTIES TABLE(4)
#define PENDING	  TABLE(5)
#define FIRST_LPI 8192

/* Header of an arm64 image of 2M. */
__asm__("	b	start\n"
	"	.long	0\n"
	"	.quad	0, 2 << 20, 0xa, 0, 0, 0\n"
	"	.ascii	\"ARM\\x64\"\n"
	"	.long	0\n"
	"start:	ldr	x0, =0x40100000\n"
	"	mov	sp, x0\n"
	"	b	run\n"
	"	.ltorg\n");

static void write32(u64 address, u32 value)
{
	__asm__ volatile("str %w0, [%1]" : : "r"(value), "r"(address) : "memory");
}

static void write64(u64 address, u64 value)
{
	__asm__ volatile("str %0, [%1]" : : "r"(value), "r"(address) : "memory");
}

static u64 read64(u64 address)
{
	u64 value;

	__asm__ volatile("ldr %0, [%1]" : "=r"(value) : "r"(address) : "memory");
	return value;
}

static void write8(u64 address, u8 value)
{
	__asm__ volatile("strb %w0, [%1]" : : "r"(value), "r"(address) : "memory");
}

static void print(const char *text, u32 number)
{
	u32 place = 10000;

	for (; *text; text++)
		write8(SERIAL, *text);
	for (; place; place /= 10)
		write8(SERIAL, '0' + number / place % 10);
	write8(SERIAL, '\n');
}

static u64 commands;

/* Executes a command of the ITS, and the one that waits for its effect. */
static void command(u64 word0, u64 word1, u64 word2)
{
	u64 words[] = { word0, word1, word2, 0, 5, 0, 0, 0 }; /* SYNC */

	for (u32 i = 0; i < 8; i++)
		write64(COMMANDS + commands % 0x1000 + i * 8, words[i]);
	commands += sizeof(words);
	__asm__ volatile("dsb sy" : : : "memory");
	write64(ITS + 0x88, commands % 0x1000); /* CWRITER */
	while (read64(ITS + 0x90) != commands % 0x1000) /* CREADR */
		;
}

static void set_up(void)
{
	const u64 valid = 1ul << 63;

	write32(GICD, 0x12); /* affinity routing, group 1 */
	write32(GICR + 0x14, 0); /* WAKER: awake */
	write8(PROPERTIES, 0xa0 | 1); /* the priority of the first LPI; enabled */
	write64(GICR + 0x70, PROPERTIES | 13); /* 14 bits of interrupts */
	write64(GICR + 0x78, PENDING | 1ul << 62); /* all bits are zero */
	write32(GICR, 1); /* CTLR: enable LPIs */
	write64(ITS + 0x100, valid | DEVICES | 2 << 8); /* one page of 64K each */
	write64(ITS + 0x108, valid | COLLECTIONS | 2 << 8);
	write64(ITS + 0x80, valid | COMMANDS); /* one page of 4K */
	write32(ITS, 1);
	command(9, 0, valid); /* MAPC: collection 0 to redistributor 0 */
	command(8 | 7ul << 32, 4, valid | EVENTS); /* MAPD: device 7, 32 events */
	command(10 | 7ul << 32, 3 | (u64)FIRST_LPI << 32, 0); /* MAPTI: event 3 */
	command(12 | 7ul << 32, 3, 0); /* INV */
	__asm__ volatile("msr S3_0_C12_C12_5, %0\n" /* ICC_SRE_EL1 */
			 "isb\n"
			 "msr S3_0_C4_C6_0, %1\n" /* ICC_PMR_EL1 */
			 "msr S3_0_C12_C12_7, %0\n" /* ICC_IGRPEN1_EL1 */
			 "isb" : : "r"(1ul), "r"(0xfful));
}

/* Acknowledges the pending interrupt and returns it, or 1023. */
static u32 receive(void)
{
	u64 interrupt;

	__asm__ volatile("mrs %0, S3_0_C12_C12_0\n" /* ICC_IAR1_EL1 */
			 "dsb sy" : "=r"(interrupt));
	__asm__ volatile("msr S3_0_C12_C12_1, %0\n" /* ICC_EOIR1_EL1 */
			 "isb" : : "r"(interrupt));
	return interrupt;
}

static u64 ticks(void)
{
	u64 count;

	__asm__ volatile("isb\n"
			 "mrs %0, cntvct_el0" : "=r"(count));
	return count;
}

void run(void)
{
	u64 frequency, start;

	set_up();
	command(3 | 7ul << 32, 3, 0); /* INT */
	print("pending: ", FIRST_LPI);
	__asm__ volatile("mrs %0, cntfrq_el0" : "=r"(frequency));
	start = ticks();
	while (ticks() - start < frequency)
		;
	print("received: ", receive());
	print("then: ", receive());
	command(3 | 7ul << 32, 3, 0);
	print("again: ", receive());
	__asm__ volatile("mov w0, #8\n" /* PSCI SYSTEM_OFF */
			 "movk w0, #0x8400, lsl #16\n"
			 "hvc #0" : : : "x0", "x1", "x2", "x3");
}
