// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Guest program of the page-table test for arm64. It runs at EL1 with MMU and caches enabled; the
// host builds the stage-1 tables and sets the system registers.
//
// TPIDR_EL1 holds the address of the vCPU's mailbox; guest/mailbox.rs describes the protocol. After
// a store to a doorbell, the next entry continues with the next task. An exception is fatal.
//
// The program needs no stack and is position-independent. The host copies it to an address aligned
// to 2K, for its vectors. guest/mod.rs defines the names in braces.
//
//	x0  access		x5  number of reads after each write
//	x1  address		x6  distance between these reads
//	x2  addresses left	x7  seed
//	x3  stride		x9 to x11  scratch
//	x4  first read's offset	x27 mailbox, x28 doorbells, x30 link register

	.pushsection .rodata.granule_guest, "a", %progbits
	.balign	2048
	.globl	granule_guest_start
granule_guest_start:

// --- Vectors: sixteen entries of 128 bytes, each of which loads its number.

	.irp	number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
	.balign	128
	mrs	x27, tpidr_el1
	mov	x26, #\number
	b	.Lfatal
	.endr
	.balign	128

.Lfatal:
	mrs	x25, esr_el1
	stp	x26, x25, [x27, #{VECTOR}]	// vector, syndrome
	mrs	x25, elr_el1
	mrs	x24, far_el1
	stp	x25, x24, [x27, #{ELR}]		// return address, fault address
	ldr	x28, [x27, #{DOORBELL}]
1:	str	xzr, [x28, #{FATAL_DOORBELL}]
	b	1b				// the guest cannot continue

// --- Entry of the first task.

	.balign	64
	.globl	granule_guest_entry
granule_guest_entry:
	mrs	x27, tpidr_el1
	ldr	x28, [x27, #{DOORBELL}]

.Lnext:
	ldp	x0, x1, [x27, #{ACCESS}]	// access, first address
	ldp	x2, x3, [x27, #{COUNT}]		// count, stride
	ldp	x4, x5, [x27, #{READ_OFFSET}]	// offset and count of the reads after a write
	ldp	x6, x7, [x27, #{READ_STRIDE}]	// their stride, seed
	cbz	x2, .Ldone
	cmp	x0, #{READ}
	b.eq	.Lread
	cmp	x0, #{WRITE}
	b.eq	.Lwrite
	cmp	x0, #{WRITE_THEN_READ}
	b.eq	.Lwrite_then_read
	cmp	x0, #{INSTALL_RETURN}
	b.eq	.Linstall_return
	cmp	x0, #{EXECUTE}
	b.eq	.Lexecute
	cmp	x0, #{VERIFY}
	b.eq	.Lverify
	cmp	x0, #{WRITE_AT_RANDOM}
	b.eq	.Lwrite_at_random

.Ldone:
	str	xzr, [x28, #{DONE_DOORBELL}]
	b	.Lnext

.Lread:
	ldr	x9, [x1]
	add	x1, x1, x3
	subs	x2, x2, #1
	b.ne	.Lread
	b	.Ldone

.Lwrite:
	eor	x9, x7, x1
	str	x9, [x1]
	add	x1, x1, x3
	subs	x2, x2, #1
	b.ne	.Lwrite
	b	.Ldone

.Lwrite_then_read:
	eor	x9, x7, x1
	str	x9, [x1]
	cbz	x5, 2f
	add	x10, x1, x4
	mov	x11, x5
1:	ldr	x9, [x10]
	add	x10, x10, x6
	subs	x11, x11, #1
	b.ne	1b
2:	add	x1, x1, x3
	subs	x2, x2, #1
	b.ne	.Lwrite_then_read
	b	.Ldone

// Writes a "ret" RETURN_OFFSET bytes after the address and makes it visible to instruction fetch on
// every CPU (Arm manual, B2.4.4). The 8 bytes at the address hold the value that Verify expects.
.Linstall_return:
	movz	w9, #0x03c0
	movk	w9, #0xd65f, lsl #16
1:	add	x10, x1, #{RETURN_OFFSET}
	str	w9, [x10]
	dc	cvau, x10
	dsb	ish
	ic	ivau, x10
	dsb	ish
	isb
	add	x1, x1, x3
	subs	x2, x2, #1
	b.ne	1b
	b	.Ldone

.Lexecute:
	isb					// vCPU 0 installed the code: synchronise
1:	add	x10, x1, #{RETURN_OFFSET}
	blr	x10
	add	x1, x1, x3
	subs	x2, x2, #1
	b.ne	1b
	b	.Ldone

.Lverify:
	ldr	x9, [x1]
	eor	x10, x7, x1
	cmp	x9, x10
	b.ne	.Lmismatch
	add	x1, x1, x3
	subs	x2, x2, #1
	b.ne	.Lverify
	b	.Ldone

// Writes to the pages of `task::RandomWalk`, whose state is x7. Each write stores its number, which
// the guest also stores in the mailbox page.
.Lwrite_at_random:
	mov	x10, #0
1:	ldr	x9, [x27, #{STOP}]
	cbnz	x9, .Ldone
	eor	x7, x7, x7, lsl #13
	eor	x7, x7, x7, lsr #7
	eor	x7, x7, x7, lsl #17
	umulh	x9, x7, x2
	madd	x9, x9, x3, x1
	add	x10, x10, #1
	str	x10, [x9]
	str	x10, [x27, #{WRITES}]
	b	1b

.Lmismatch:
	stp	x1, x9, [x27, #{MISMATCH_ADDRESS}]	// address, value
	str	xzr, [x28, #{MISMATCH_DOORBELL}]
	b	.Lnext

	.globl	granule_guest_end
granule_guest_end:
	.popsection
