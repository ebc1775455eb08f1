// SPDX-License-Identifier: GPL-2.0-or-later
//! The system registers of a CPU that control stage 2.

use std::mem;

use granule_stage2::check::machine::event::MachineAction;

use super::instruction::SystemRegister;

/// A CPU's registers that decide on the meaning of its instructions.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRegisters {
    vttbr: u64,
    /// VTCR_EL2.
    pub vtcr: u64,
    hcr: u64,
}

impl SystemRegisters {
    /// Returns whether EL1 and EL0 are a guest: stage 2 is on, the CPU is not in the host's EL0 of
    /// VHE, and the VMID is not 0, which KVM reserves for the host.
    pub const fn select_guest(self) -> bool {
        const VM: u64 = 1;
        const TGE: u64 = 1 << 27;
        self.hcr & (VM | TGE) == VM && self.vttbr >> 48 != 0
    }

    /// Returns whether the registers of EL1 are those of EL2 at EL2 (VHE).
    pub const fn redirect_el1(self) -> bool {
        const E2H: u64 = 1 << 34;
        self.hcr & E2H != 0
    }

    /// Returns whether invalidations of EL1 apply to the EL2&0 regime at EL2: E2H and TGE are set.
    pub const fn invalidate_el2(self) -> bool {
        const TGE: u64 = 1 << 27;
        self.redirect_el1() && self.hcr & TGE != 0
    }

    /// Returns VTTBR_EL2 and VTCR_EL2 if a write of a register, over these values, selects a root. A
    /// hypervisor may write VTTBR_EL2 first: VTCR_EL2 is valid when stage 2 is enabled.
    pub const fn root_selected_by(
        self,
        register: SystemRegister,
        before: Self,
    ) -> Option<(u64, u64)> {
        let selects = match register {
            SystemRegister::Vttbr => true,
            SystemRegister::Hcr => self.select_guest(),
            // A later value is that of the guest whose VTTBR_EL2 follows.
            SystemRegister::Vtcr => self.select_guest() && before.vtcr == 0,
            SystemRegister::Kernel(_) => false,
        };
        if selects { Some((self.vttbr, self.vtcr)) } else { None }
    }

    /// Sets a register; returns the event, or `None` if it has this value.
    pub fn set(&mut self, register: SystemRegister, value: u64) -> Option<MachineAction> {
        let (field, action) = match register {
            SystemRegister::Vttbr => (&mut self.vttbr, MachineAction::SetVttbr(value)),
            SystemRegister::Vtcr => (&mut self.vtcr, MachineAction::SetVtcr(value)),
            SystemRegister::Hcr => (&mut self.hcr, MachineAction::SetHcr(value)),
            SystemRegister::Kernel(_) => return None,
        };
        (mem::replace(field, value) != value).then_some(action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage_2_with_a_vmid_selects_a_guest() {
        let mut registers = SystemRegisters::default();
        for (register, value, is_guest) in [
            (SystemRegister::Hcr, 1, false),
            (SystemRegister::Vttbr, 0x4000_0000, false),
            (SystemRegister::Vttbr, 0x1_0000_4000_0000, true),
            (SystemRegister::Hcr, 1 | 1 << 27, false),
            (SystemRegister::Hcr, 1 | 1 << 34, true),
            (SystemRegister::Hcr, 1 << 34, false),
        ] {
            assert!(registers.set(register, value).is_some());
            assert!(registers.set(register, value).is_none());

            assert_eq!(registers.select_guest(), is_guest, "{register:?} {value:#x}");
        }
    }
}
