// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// The guest: two vCPUs at EL1 without stage 1. Both write every 16th page of one block, before and
// after each change of its mapping. Address independent; x0: number of the vCPU.
//
// x19: vCPU, x20: page for meetings, x21: the block, x22: number of the round.

.macro round call, address, size
    bl meet
    cbnz x19, 1f
    mov x0, #\call
    add x1, x21, #\address
    mov x2, #\size
    hvc #0
1:  bl meet
    bl touch
.endm

.section .rodata.guest, "a"
.balign 8
.globl guest_start
guest_start:
    mov x19, x0
    mov x20, #0x80400000
    mov x21, #0x80200000
    mov x22, #0
    bl meet
    bl touch                     // translation faults: the block is mapped
    round 1, 0, 0x200000         // write-protected: a write splits the block
    round 2, 0, 0x10000          // pages unmapped: mapped again
    round 1, 0, 0x200000         // pages write-protected: relaxed again
    round 3, 0, 0x200000         // the block is recovered
    round 4, 0, 0x200000         // the block is moved to other memory
    round 1, 0, 0x200000         // write-protected: a write splits the block
    round 2, 0, 0x200000         // the whole table is unmapped: a block again
    bl meet
    mov x0, #0
    hvc #0

// Waits for the other vCPU.
meet:
    add x22, x22, #1
    dsb sy
    add x9, x20, x19, lsl #6
    str x22, [x9]
    eor x10, x19, #1
    add x9, x20, x10, lsl #6
2:  ldr x10, [x9]
    cmp x10, x22
    b.lo 2b
    dsb sy
    ret

// Writes the number of the round to this vCPU's pages: those with its number plus a multiple of 16.
touch:
    add x9, x21, x19, lsl #12
    add x10, x21, #0x200000
3:  str x22, [x9, #8]
    ldr x11, [x9, #8]
    cmp x11, x22
    b.ne 4f
    add x9, x9, #0x10000
    cmp x9, x10
    b.lo 3b
    ret
4:  mov x0, #5                   // memory differs
    hvc #0
.globl guest_end
guest_end:
