// SPDX-License-Identifier: GPL-2.0-or-later
//
// The header of a raw image: QEMU loads it at the start of memory plus the offset.
.globl _start
_start:
    b boot
    .long 0
    .quad 0x80000
    .quad 0x10000
    .quad 0x2
    .quad 0, 0, 0
    .ascii "ARM\x64"
    .long 0
