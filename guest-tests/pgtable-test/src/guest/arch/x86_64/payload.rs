// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Assembles the guest program into this program, between the symbols of [`crate::guest::program`].
//! The program begins with the entry points of the exceptions.

use std::mem::offset_of;

use super::{DOORBELL, descriptors};
use crate::guest::mailbox::{self, Doorbell, Mailbox};

std::arch::global_asm!(
    include_str!("../../../../payload/x86_64.S"),
    ACCESS = const offset_of!(Mailbox, access),
    START = const offset_of!(Mailbox, start),
    COUNT = const offset_of!(Mailbox, count),
    STRIDE = const offset_of!(Mailbox, stride),
    INNER_FIRST = const offset_of!(Mailbox, inner_first),
    INNER_COUNT = const offset_of!(Mailbox, inner_count),
    INNER_STRIDE = const offset_of!(Mailbox, inner_stride),
    SEED = const offset_of!(Mailbox, seed),
    DIFFERS_AT = const offset_of!(Mailbox, differs_at),
    DIFFERS_FOUND = const offset_of!(Mailbox, differs_found),
    VECTOR = const offset_of!(Mailbox, vector),
    SYNDROME = const offset_of!(Mailbox, syndrome),
    PC = const offset_of!(Mailbox, pc),
    FAULT_ADDRESS = const offset_of!(Mailbox, fault_address),
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
    DONE_DOORBELL = const DOORBELL as u64 + Doorbell::Done.offset(),
    DIFFERS_DOORBELL = const DOORBELL as u64 + Doorbell::Differs.offset(),
    FATAL_DOORBELL = const DOORBELL as u64 + Doorbell::Fatal.offset(),
    ENTRY_SIZE = const descriptors::ENTRY_SIZE,
);
