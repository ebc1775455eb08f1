// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Assembles the guest program into this program, between the symbols of [`crate::guest::program`].
//! The guest address of the program must be aligned to 2 KiB, as its exception vectors come first.

use std::mem::offset_of;

use crate::guest::mailbox::{self, Doorbell, Mailbox};

std::arch::global_asm!(
    include_str!("../../../../payload/aarch64.S"),
    ACCESS = const offset_of!(Mailbox, access),
    COUNT = const offset_of!(Mailbox, count),
    INNER_FIRST = const offset_of!(Mailbox, inner_first),
    INNER_STRIDE = const offset_of!(Mailbox, inner_stride),
    DIFFERS_AT = const offset_of!(Mailbox, differs_at),
    VECTOR = const offset_of!(Mailbox, vector),
    ELR = const offset_of!(Mailbox, pc),
    DOORBELL = const offset_of!(Mailbox, doorbell),
    READ = const mailbox::READ_CODE,
    WRITE = const mailbox::WRITE_CODE,
    WRITE_THEN_READ = const mailbox::WRITE_THEN_READ_CODE,
    PLANT = const mailbox::PLANT_CODE,
    EXECUTE = const mailbox::EXECUTE_CODE,
    VERIFY = const mailbox::VERIFY_CODE,
    WRITE_AT_RANDOM = const mailbox::WRITE_AT_RANDOM_CODE,
    STOP = const mailbox::STOP_OFFSET,
    WRITES = const mailbox::WRITES_OFFSET,
    PLANT_OFFSET = const mailbox::PLANT_OFFSET,
    DONE_DOORBELL = const Doorbell::Done.offset(),
    DIFFERS_DOORBELL = const Doorbell::Differs.offset(),
    FATAL_DOORBELL = const Doorbell::Fatal.offset(),
);
