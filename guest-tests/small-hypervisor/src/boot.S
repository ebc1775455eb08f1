// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Entry of both CPUs at EL2, stage 1 of EL2, and the exception vectors.

.macro number register, value
    movz \register, #((\value) & 0xffff)
    movk \register, #(((\value) >> 16) & 0xffff), lsl #16
    movk \register, #(((\value) >> 32) & 0xffff), lsl #32
.endm

// EL1 is AArch64; stage 2 is on in the guest only: the checker takes a CPU with HCR_EL2.VM for a guest.
.equ HCR_HOST, 0x80000000
.equ HCR_GUEST, 0x80000001

.section .text.boot, "ax"
.globl _start
_start:
    adrp x0, bss_start
    add x0, x0, :lo12:bss_start
    adrp x1, bss_end
    add x1, x1, :lo12:bss_end
1:  cmp x0, x1
    b.hs start_second_cpu
    stp xzr, xzr, [x0], #16
    b 1b

.globl start_second_cpu
start_second_cpu:
    adr x0, vectors
    msr vbar_el2, x0
    mov x0, #0x33ff              // RES1; no traps of floating point
    msr cptr_el2, x0
    number x0, 0xff00            // attribute 0: Device-nGnRnE; 1: Normal, write-back
    msr mair_el2, x0
    number x0, 0x80823519        // 39 address bits, 4K, inner shareable, write-back, 40-bit output
    msr tcr_el2, x0
    adrp x0, identity_map
    msr ttbr0_el2, x0
    isb
    tlbi alle2
    dsb nsh
    isb
    number x0, 0x30c51835        // RES1, caches, MMU
    msr sctlr_el2, x0
    isb
    mrs x0, mpidr_el1
    and x0, x0, #0xff
    adrp x1, stacks
    add x2, x0, #1
    add x1, x1, x2, lsl #16      // 64K for each CPU
    mov sp, x1
    mov x29, xzr
    mov x30, xzr
    bl run_cpu
    b .

.text
// Runs the guest: address, argument.
.globl enter_guest
enter_guest:
    number x2, HCR_GUEST
    msr hcr_el2, x2
    msr elr_el2, x0
    mov x0, x1
    mov x1, #0x3c5               // EL1h, interrupts masked
    msr spsr_el2, x1
    eret

.macro vector target
    .balign 128
    b \target
.endm

.balign 2048
vectors:
    .rept 8
    vector unexpected
    .endr
    vector exit                  // synchronous, from a lower EL in AArch64
    .rept 7
    vector unexpected
    .endr

exit:
    sub sp, sp, #256
    stp x0, x1, [sp, #0]
    stp x2, x3, [sp, #16]
    stp x4, x5, [sp, #32]
    stp x6, x7, [sp, #48]
    stp x8, x9, [sp, #64]
    stp x10, x11, [sp, #80]
    stp x12, x13, [sp, #96]
    stp x14, x15, [sp, #112]
    stp x16, x17, [sp, #128]
    stp x18, x19, [sp, #144]
    stp x20, x21, [sp, #160]
    stp x22, x23, [sp, #176]
    stp x24, x25, [sp, #192]
    stp x26, x27, [sp, #208]
    stp x28, x29, [sp, #224]
    str x30, [sp, #240]
    number x0, HCR_HOST
    msr hcr_el2, x0
    mov x0, sp
    mov x29, xzr
    mov x30, xzr
    bl handle_exit
    number x0, HCR_GUEST
    msr hcr_el2, x0
    ldp x0, x1, [sp, #0]
    ldp x2, x3, [sp, #16]
    ldp x4, x5, [sp, #32]
    ldp x6, x7, [sp, #48]
    ldp x8, x9, [sp, #64]
    ldp x10, x11, [sp, #80]
    ldp x12, x13, [sp, #96]
    ldp x14, x15, [sp, #112]
    ldp x16, x17, [sp, #128]
    ldp x18, x19, [sp, #144]
    ldp x20, x21, [sp, #160]
    ldp x22, x23, [sp, #176]
    ldp x24, x25, [sp, #192]
    ldp x26, x27, [sp, #208]
    ldp x28, x29, [sp, #224]
    ldr x30, [sp, #240]
    add sp, sp, #256
    eret

unexpected:
    mrs x0, esr_el2
    mrs x1, elr_el2
    mrs x2, far_el2
    bl stop_at_unexpected_exception

// 1G of devices, 1G of memory.
.section .rodata
.balign 4096
identity_map:
    .quad 0x0040000000000441
    .quad 0x0000000040000745
    .fill 510, 8, 0
