// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernels of the published figures, as policies of the engine.

use granule_stage2::{CmoPlacement, Coalesce, ExistingLeaf, Policy};

/// A kernel of the published figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PublishedKernel {
    /// Linux 5.12-rc2: 5.10, except that a leaf that differs in permissions only is kept.
    Base,
    /// With cache maintenance in the map handlers.
    Handlers,
    /// With cache maintenance in the map handlers, and the block installed before the tables are
    /// freed; as published, without cleaning the block's memory.
    InstallFirst,
}

impl PublishedKernel {
    /// The kernels, in the order of their changes.
    pub const ALL: [Self; 3] = [Self::Base, Self::Handlers, Self::InstallFirst];

    /// Returns the name that `--policy` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Base => "linux-5.12",
            Self::Handlers => "linux-5.12+handlers",
            Self::InstallFirst => "linux-5.12+handlers+install-first",
        }
    }

    /// Returns the policy of the kernel's fault path.
    pub const fn policy(self) -> Policy {
        let base = Policy {
            existing_leaf: ExistingLeaf::Retry,
            ..Policy::LINUX_5_10
        };
        match self {
            Self::Base => base,
            Self::Handlers => Policy {
                cmo: CmoPlacement::BetweenBreakAndMake,
                ..base
            },
            Self::InstallFirst => Policy {
                cmo: CmoPlacement::BetweenBreakAndMake,
                coalesce: Coalesce::InstallWithoutCmo,
                ..base
            },
        }
    }
}
