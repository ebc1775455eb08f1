// SPDX-License-Identifier: GPL-2.0-or-later
//
// A program whose trace is known, for QEMU's virt machine with EL2 and -cpu max. It executes every
// instruction that can change a stage-2 table, with the MMU off. The events are in the comments that
// start with `//=`, in the order of the trace, separated by `;`.
//
// Table pages: ROOT (level 1), TABLE (level 2). x20: ROOT, x21: TABLE, x22: PAGES.

.arch armv8.8-a+mops
#define ROOT  0x40100000
#define TABLE 0x40101000
#define PAGES 0x40200000
#define VTCR  0x59               // 39 address bits, start at level 1, 4K pages
#define LEAF  0x402007fd

.macro number register, value
    movz \register, #((\value) & 0xffff)
    movk \register, #((\value) >> 16), lsl #16
.endm

#include "bare_metal/image.h"

boot:
    number x20, ROOT
    number x21, TABLE
    number x22, PAGES
    adr x0, vectors
    msr vbar_el2, x0
    mov x0, #(3 << 20)
    msr cptr_el2, xzr            // no traps of SIMD
    msr cpacr_el1, x0

// The root, and a table that is written before it is linked, without a barrier and with one.
    number x23, 0x400007fd
    str x23, [x20, #8]           //= 0 write 40100000
    number x0, VTCR
    msr vtcr_el2, x0             //= 0 vtcr 59
    movk x20, #1, lsl #48
    msr vttbr_el2, x20           //= 0 table 40100000 1 0 1=400007fd; 0 vttbr 1000040100000
    msr vttbr_el2, x20
    movk x20, #0, lsl #48
    number x1, LEAF
    str x1, [x21, #8]            //= 0 write 40101000
    dmb ishld                    //= 0 dmb ishld
    orr x2, x21, #3
    str x2, [x20]                //= 0 table 40101000 2 0 1=402007fd; 0 store 40100000 0 40101003 plain
    str x2, [x20]
    str xzr, [x20]               //= 0 store 40100000 40101003 0 plain
    dmb ishst                    //= 0 dmb ishst
    stlr x2, [x20]               //= 0 table 40101000 2 - 1=402007fd; 0 store 40100000 0 40101003 release

// Stores.
    number x8, (LEAF + 0x200000)
    add x3, x21, #16
    str x1, [x3], #8             //= 0 store 40101010 0 402007fd plain
    stur x1, [x3]                //= 0 store 40101018 0 402007fd plain
    stlur x1, [x3, #8]           //= 0 store 40101020 0 402007fd release
    str w1, [x3, #16]            //= 0 store 40101028 0 402007fd plain
    str w1, [x3, #20]            //= 0 store 40101028 402007fd 402007fd402007fd plain
    stp x1, x8, [x3, #24]        //= 0 store 40101030 0 402007fd plain; 0 store 40101038 0 404007fd plain
    stp xzr, x8, [x3, #24]       //= 0 store 40101030 402007fd 0 plain
    dup v0.2d, x1
    str q0, [x3, #40]            //= 0 store 40101040 0 402007fd plain; 0 store 40101048 0 402007fd plain
    add x4, x21, #0x50
    st1 {v0.2d}, [x4], #16       //= 0 store 40101050 0 402007fd plain; 0 store 40101058 0 402007fd plain
    stnp x1, xzr, [x4]           //= 0 store 40101060 0 402007fd plain

// Compare-and-swap, exclusive stores and atomic operations; those that fail change nothing.
    add x3, x21, #0x100
    mov x4, #0
    cas x4, x1, [x3]             //= 0 store 40101100 0 402007fd relaxed-swap
    mov x4, #5
    casal x4, x8, [x3]
    mov x4, #0
    mov x5, #0
    mov x6, x1
    mov x7, x8
    add x3, x21, #0x110
    casp x4, x5, x6, x7, [x3]    //= 0 store 40101110 0 402007fd relaxed-swap; 0 store 40101118 0 404007fd relaxed-swap
    mov x4, #9
    caspal x4, x5, x4, x5, [x3]
    add x3, x21, #0x120
    ldxr x4, [x3]
    stxr w5, x1, [x3]            //= 0 store 40101120 0 402007fd relaxed-swap
    stlxr w5, x8, [x3]
    ldaxp x4, x5, [x3]
    stlxp w5, x8, xzr, [x3]      //= 0 store 40101120 402007fd 404007fd swap
    mov x4, #0x800
    ldset x4, x5, [x3]           //= 0 store 40101120 404007fd 40400ffd relaxed-swap
    ldclral x4, x5, [x3]         //= 0 store 40101120 40400ffd 404007fd swap
    ldclral x4, x5, [x3]
    stadd x4, [x3]               //= 0 store 40101120 404007fd 40400ffd relaxed-swap
    swpal xzr, x5, [x3]          //= 0 store 40101120 40400ffd 0 swap

// Memory that is zeroed or set by one instruction.
    add x3, x21, #0x108
    dc zva, x3                   //= 0 store 40101100 402007fd 0 plain; 0 store 40101110 402007fd 0 plain; 0 store 40101118 404007fd 0 plain
    dc zva, x22                  //= 0 write 40200000
    number x3, (PAGES + 0x1800)
    mov x4, #0x1000
    setp [x3]!, x4!, xzr         //= 0 write 40201000; 0 write 40202000
    setm [x3]!, x4!, xzr
    sete [x3]!, x4!, xzr
    number x3, (PAGES + 0x4000)
    mov x4, #64
    mov x5, x22
    cpyfp [x3]!, [x5]!, x4!      //= 0 write 40204000
    cpyfm [x3]!, [x5]!, x4!
    cpyfe [x3]!, [x5]!, x4!

// Maintenance. Adjacent lines are one event, which ends before the next event.
    dc civac, x22
    add x3, x22, #64
    dc civac, x3
    str xzr, [x22]               //= 0 dc civac 40200000 80; 0 write 40200000
    dc cvau, x3                  //= 0 dc cvau 40200040 40
    ic ivau, x3                  //= 0 ic ivau 40200040 40
    ic iallu                     //= 0 ic iallu
    ic ialluis                   //= 0 ic ialluis
    dsb nsh                      //= 0 dsb nsh
    dsb nsh
    dsb nshst
    isb                          //= 0 isb
    isb
    dsb ish                      //= 0 dsb ish
    dmb ishld
    isb                          //= 0 isb
    mov x0, #0x41a
    tlbi ipas2e1is, x0           //= 0 tlbi ipas2e1is 41a
    tlbi vmalls12e1is            //= 0 tlbi vmalls12e1is 0
    tlbi vae2is, x0
    dsb osh                      //= 0 dsb osh

// Calls, a watched word, and a freed tree.
    mov x0, x22
    mov x1, #1
    mov x2, #2
    mov x3, #3
    bl function
    b behind_function
// Fixed addresses, which the test passes to the plugin.
.org 0x400
function:                        //= 0 enter 7 40200000 1 2 3
    mov x4, #1
    str w4, [x0, #12]            //= 0 word 4020000c 0 1
    str w4, [x0, #8]
    mov x0, #42
    ret                          //= 0 leave 7 2a
.org 0x440
behind_function:

// A guest at EL1, in which nothing is observed.
    number x0, 0x80000001
    msr hcr_el2, x0              //= 0 hcr 80000001
    isb                          //= 0 isb
    adr x0, guest
    msr elr_el2, x0
    mov x0, #0x3c5               // EL1h, interrupts masked
    msr spsr_el2, x0
    eret
guest:
    str x22, [x22, #0x6000]
    dsb sy
    isb
    dc civac, x22
    tlbi vmalle1is
    bl function
    hvc #0
host:
    number x0, 0x80000000
    msr hcr_el2, x0              //= 0 hcr 80000000
    str x20, [x22, #0x7000]      //= 0 write 40207000
    number x0, (PAGES + 0x6ff0)
    bl free                      //= 0 free 40100000
    str xzr, [x20]
    dc civac, x20                //= 0 dc civac 40100000 40
    str xzr, [x20]               //= 0 write 40100000
    number x0, 0x84000008        // PSCI SYSTEM_OFF
    smc #0

.balign 2048
vectors:
    .skip 0x400                  // a lower EL that uses AArch64
    b host

// A fixed address, which the test passes to the plugin.
.org 0x1000
free:
    ret
