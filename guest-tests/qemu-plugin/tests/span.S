// SPDX-License-Identifier: GPL-2.0-or-later
//
// A program with known counts, for QEMU's virt machine with EL2. A comment `//= NAME` follows each
// instruction of the span that is counted by its name; `//+ NUMBER` is its number of executions,
// 1 without it. The function is called twice; the second time from another place, without a mark.
//
// Symbols: `measured` is at START + 0x400.

.arch armv8.2-a
#define HINT_PHASE 0x61
#define HINT_OUTSIDE 0x60
#define LOOPS 1000

#include "bare_metal/image.h"

boot:
    adrp x20, data
    str x20, [x20]
    dsb sy
    bl measured
    str x20, [x20]
    dsb sy
    hint #HINT_PHASE
    str x20, [x20]
    cbz x20, measured                // never executed: no call
    bl measured
    isb
    hint #HINT_OUTSIDE
    movz x0, #0x0008                 // PSCI SYSTEM_OFF
    movk x0, #0x8400, lsl #16
    smc #0
halt:
    b halt

.org 0x400
measured:
    mov x1, #LOOPS                   //=
loop:
    stp x1, x1, [x20]                //= stores //+ LOOPS
    ldr x2, [x20]                    //= //+ LOOPS
    subs x1, x1, #1                  //= //+ LOOPS
    b.ne loop                        //= //+ LOOPS
    mov x19, x30                     //=
    bl callee                        //=
    mov x30, x19                     //=
    tlbi vale2is, x1                 //= TLBI VALE2IS
    tlbi alle2                       //= TLBI ALLE2
    dsb ish                          //= DSB ISH
    dsb ishst                        //= DSB ISHST
    dsb nsh                          //= DSB NSH
    isb                              //= ISB
    dmb ish                          //=
    b tail                           //=

.org 0x600
callee:
    str x1, [x20]                    //= stores
    strb w1, [x20, #1]!              //= stores
    and x20, x20, #~0xfff            //=
    ret                              //=

tail:
    dsb ishst                        //= DSB ISHST
    ret                              //=

.balign 4096
data:
    .skip 4096
