// SPDX-License-Identifier: GPL-2.0-or-later
//
// A program with known elapsed time, for QEMU's virt machine with EL2. CPU 0 starts the other CPUs.
// When all run, a mark starts the measured phase: each CPU has one turn of WORK instructions.
// SCENARIO selects the relation of the turns:
//
//   0  all at once
//   1  one after another; the others wait by WFE
//   2  ... by YIELD
//   3  ... by loads alone
//   4  ... by WFI, and get an interrupt
//   5  all at once; half of the work is under a ticket lock, in sections of SECTION instructions
//
// Registers: x19 number of the CPU, x20 the shared words.

.arch armv8.1-a
#define HINT_PHASE 0x61
#define HINT_OUTSIDE 0x60
#define READY 0          // CPUs that have started
#define GO 64            // 1: the phase has begun
#define TURN 128         // CPU whose turn it is
#define DONE 192         // CPUs that have ended
#define TICKET 256       // next ticket of the lock
#define SERVED 320       // ticket that holds the lock
#define SECTION 1000
#define GICD 0x08000000
#define GICC 0x08010000

.macro number register, value
    movz \register, #((\value) & 0xffff)
    movk \register, #((\value) >> 16), lsl #16
.endm

.macro add_one offset
    add x1, x20, #\offset
    mov x2, #1
    ldadd x2, x3, [x1]
.endm

#include "bare_metal/image.h"

boot:
    mov x19, #0
    adrp x20, shared
    mov x21, #1
start_next:
    cmp x21, #CPUS
    b.eq enter
    number x0, 0xc4000003            // PSCI CPU_ON
    mov x1, x21
    adr x2, secondary
    mov x3, x21
    smc #0
    add x21, x21, #1
    b start_next

secondary:
    mov x19, x0
    adrp x20, shared

enter:
    add x1, x19, #1
    lsl x1, x1, #12
    msr tpidr_el2, x1
    // Interrupts stay masked; a pending one ends WFI. They are routed to EL2.
    number x1, 0x80000010            // RW, IMO
    msr hcr_el2, x1
#if SCENARIO == 4
    number x1, GICD
    mov w2, #1
    str w2, [x1]
    number x1, GICC
    mov w2, #0xff
    str w2, [x1, #4]
    mov w2, #1
    str w2, [x1]
#endif
    isb
    add_one READY
    cbnz x19, wait_for_go
all_ready:
    ldr x1, [x20, #READY]
    cmp x1, #CPUS
    b.ne all_ready
    hint #HINT_PHASE
    mov x1, #1
    add x2, x20, #GO
    stlr x1, [x2]
wait_for_go:
    add x2, x20, #GO
    ldar x1, [x2]
    cbz x1, wait_for_go

#if SCENARIO == 5
    number x22, (WORK / SECTION / 2)
section:
    add x1, x20, #TICKET
    mov x2, #1
    ldadd x2, x3, [x1]
    add x2, x20, #SERVED
wait_for_lock:
    ldar x1, [x2]
    cmp x1, x3
    b.eq locked
    wfe
    b wait_for_lock
locked:
    mov x1, #(SECTION / 2)
locked_work:
    subs x1, x1, #1
    b.ne locked_work
    add x3, x3, #1
    stlr x3, [x2]
    mov x1, #(SECTION / 2)
unlocked_work:
    subs x1, x1, #1
    b.ne unlocked_work
    subs x22, x22, #1
    b.ne section
#else
#if SCENARIO != 0
wait_for_turn:
    add x2, x20, #TURN
    ldar x1, [x2]
    cmp x1, x19
    b.eq turn
#if SCENARIO == 1
    wfe
#elif SCENARIO == 2
    yield
#elif SCENARIO == 4
    wfi
    number x1, GICC
    ldr w2, [x1, #0xc]               // acknowledge
    str w2, [x1, #0x10]              // end
#endif
    b wait_for_turn
turn:
#endif
    number x1, (WORK / 2)
work:
    subs x1, x1, #1
    b.ne work

#endif
#if SCENARIO != 0 && SCENARIO != 5
    add x1, x19, #1
    add x2, x20, #TURN
    stlr x1, [x2]
#if SCENARIO == 4
    cmp x1, #CPUS
    b.eq end
    mov w2, #(1 << 16)               // software interrupt 0 for CPU x1
    lsl w2, w2, w1
    number x1, GICD
    dsb ish
    str w2, [x1, #0xf00]
end:
#else
    dsb ish
    sev
#endif
#endif
    add_one DONE
    cbnz x19, halt
all_done:
    ldr x1, [x20, #DONE]
    cmp x1, #CPUS
    b.ne all_done_wait
    hint #HINT_OUTSIDE
    number x0, 0x84000008            // PSCI SYSTEM_OFF
    smc #0
all_done_wait:
    yield
    b all_done
halt:
    wfi
    b halt

.balign 4096
shared:
    .skip 4096
