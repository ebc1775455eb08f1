// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Guest program of the page-table test for x86_64. It runs at privilege level 0 in long mode; the
// host builds the page and descriptor tables and sets the registers.
//
// The GS segment starts at the vCPU's mailbox; the stack is at the end of the mailbox's page.
// guest/mailbox.rs describes the protocol. After a write to a doorbell, the next entry continues
// with the next task. An exception is fatal.
//
// The program is position-independent. guest/mod.rs defines the names in braces.
//
//	rax access		r9  first read's offset
//	rsi address		r10 number of reads after each write
//	rcx addresses left	r11 distance between these reads
//	r8  stride		rbx seed
//	rdx, rbp, rdi scratch

	.pushsection .rodata.granule_guest, "a", @progbits
	.balign	64
	.globl	granule_guest_start
granule_guest_start:

// --- Exceptions: 32 entries. Each pushes its number, and an error code of 0 if the CPU pushes none
// (the CPU pushes one for 8, 10 to 14, 17, 21, 29 and 30).

	.irp	first, 0, 16
	.irp	next, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
	.balign	{EXCEPTION_ENTRY_SIZE}
	.if	(0x60227d00 >> (\first + \next)) & 1 == 0
	push	0
	.endif
	push	\first + \next
	jmp	.Lfatal
	.endr
	.endr
	.balign	{EXCEPTION_ENTRY_SIZE}

.Lfatal:
	pop	rax
	mov	gs:[{VECTOR}], rax
	pop	rax
	mov	gs:[{SYNDROME}], rax
	pop	rax
	mov	gs:[{PC}], rax
	mov	rax, cr2
	mov	gs:[{FAULT_ADDRESS}], rax
	mov	dx, {FATAL_DOORBELL}
1:	out	dx, al
	jmp	1b				// the guest cannot continue

// --- Entry of each task.

	.balign	64
	.globl	granule_guest_entry
granule_guest_entry:
	mov	rax, gs:[{ACCESS}]
	mov	rsi, gs:[{START}]
	mov	rcx, gs:[{COUNT}]
	mov	r8, gs:[{STRIDE}]
	mov	r9, gs:[{READ_OFFSET}]
	mov	r10, gs:[{READ_COUNT}]
	mov	r11, gs:[{READ_STRIDE}]
	mov	rbx, gs:[{SEED}]
	test	rcx, rcx
	jz	.Ldone
	cmp	rax, {READ}
	je	.Lread
	cmp	rax, {WRITE}
	je	.Lwrite
	cmp	rax, {WRITE_THEN_READ}
	je	.Lwrite_then_read
	cmp	rax, {INSTALL_RETURN}
	je	.Linstall_return
	cmp	rax, {EXECUTE}
	je	.Lexecute
	cmp	rax, {VERIFY}
	je	.Lverify
	cmp	rax, {WRITE_AT_RANDOM}
	je	.Lwrite_at_random

.Ldone:
	mov	dx, {DONE_DOORBELL}
	out	dx, al
	jmp	granule_guest_entry

	.balign	16
.Lread:
	mov	rdx, [rsi]
	add	rsi, r8
	dec	rcx
	jnz	.Lread
	jmp	.Ldone

	.balign	16
.Lwrite:
	mov	rdx, rbx
	xor	rdx, rsi
	mov	[rsi], rdx
	add	rsi, r8
	dec	rcx
	jnz	.Lwrite
	jmp	.Ldone

	.balign	16
.Lwrite_then_read:
	mov	rdx, rbx
	xor	rdx, rsi
	mov	[rsi], rdx
	mov	rbp, r10
	test	rbp, rbp
	jz	2f
	lea	rdi, [rsi + r9]
1:	mov	rdx, [rdi]
	add	rdi, r11
	dec	rbp
	jnz	1b
2:	add	rsi, r8
	dec	rcx
	jnz	.Lwrite_then_read
	jmp	.Ldone

// Writes a "ret" RETURN_OFFSET bytes after the address. The 8 bytes at the address hold the value
// that Verify expects.
	.balign	16
.Linstall_return:
	mov	byte ptr [rsi + {RETURN_OFFSET}], 0xc3
	add	rsi, r8
	dec	rcx
	jnz	.Linstall_return
	jmp	.Ldone

	.balign	16
.Lexecute:
	mov	cr2, rcx			// vCPU 0 installed the code: serialise (Intel SDM volume 3, 9.3)
1:	lea	rdi, [rsi + {RETURN_OFFSET}]
	call	rdi
	add	rsi, r8
	dec	rcx
	jnz	1b
	jmp	.Ldone

	.balign	16
.Lverify:
	mov	rdx, rbx
	xor	rdx, rsi
	mov	rdi, [rsi]
	cmp	rdi, rdx
	jne	.Lmismatch
	add	rsi, r8
	dec	rcx
	jnz	.Lverify
	jmp	.Ldone

// Writes to the pages of `task::RandomWalk`, whose state is rbx. Each write stores its number,
// which the guest also stores in the mailbox page.
	.balign	16
.Lwrite_at_random:
	xor	ebp, ebp
1:	cmp	qword ptr gs:[{STOP}], 0
	jne	.Ldone
	mov	rax, rbx
	shl	rax, 13
	xor	rbx, rax
	mov	rax, rbx
	shr	rax, 7
	xor	rbx, rax
	mov	rax, rbx
	shl	rax, 17
	xor	rbx, rax
	mov	rax, rbx
	mul	rcx
	imul	rdx, r8
	inc	rbp
	mov	[rsi + rdx], rbp
	mov	gs:[{WRITES}], rbp
	jmp	1b

.Lmismatch:
	mov	gs:[{MISMATCH_ADDRESS}], rsi
	mov	gs:[{MISMATCH_VALUE}], rdi
	mov	dx, {MISMATCH_DOORBELL}
	out	dx, al
	jmp	granule_guest_entry

	.globl	granule_guest_end
granule_guest_end:
	.popsection
