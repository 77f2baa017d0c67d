//! ABI version and the rule by which two sides agree on it.

/// Both sides must have the same major.
pub const ABI_MAJOR: u32 = 1;

/// Capability level: raised whenever a slot or field is appended.
pub const ABI_MINOR: u32 = 4;

/// Oldest minor whose plugins this host still loads.
pub const OLDEST_PLUGIN_MINOR: u32 = 0;

/// What a plugin states about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PluginVersion {
    /// Major it was built at.
    pub major: u32,
    /// Minor it was built at.
    pub built_minor: u32,
    /// Oldest host minor it can work with.
    pub needs_minor: u32,
}

/// Why two sides do not fit together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mismatch {
    /// Majors differ.
    Major {
        /// The plugin's.
        plugin: u32,
        /// The host's.
        host: u32,
    },
    /// The plugin needs functions this host does not have.
    HostTooOld {
        /// Minor the plugin needs.
        needs: u32,
        /// Minor the host has.
        host: u32,
    },
    /// The plugin is older than the oldest this host supports.
    PluginTooOld {
        /// Minor the plugin was built at.
        built: u32,
        /// Oldest minor the host loads.
        oldest: u32,
    },
    /// `needs_minor` is above `built_minor`: the plugin's statement contradicts itself.
    Contradiction {
        /// Minor the plugin says it needs.
        needs: u32,
        /// Minor the plugin says it was built at.
        built: u32,
    },
}

impl core::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::Major { plugin, host } if plugin > host => write!(
                f,
                "plugin uses ABI major {plugin}, this host has {host}: update mlxcel"
            ),
            Self::Major { plugin, host } => write!(
                f,
                "plugin uses ABI major {plugin}, this host has {host}: update the plugin"
            ),
            Self::HostTooOld { needs, host } => write!(
                f,
                "plugin needs ABI {ABI_MAJOR}.{needs}, this host has {ABI_MAJOR}.{host}: update mlxcel"
            ),
            Self::PluginTooOld { built, oldest } => write!(
                f,
                "plugin was built at ABI {ABI_MAJOR}.{built}, this host loads {ABI_MAJOR}.{oldest} and newer: update the plugin"
            ),
            Self::Contradiction { needs, built } => write!(
                f,
                "plugin says it needs ABI minor {needs} but was built at {built}: rebuild it with a current mlxcel-sdk"
            ),
        }
    }
}

/// Decides whether a host of `(ABI_MAJOR, host_minor)` loads `plugin`. Product versions play no
/// part in it.
pub fn negotiate(plugin: PluginVersion, host_minor: u32, oldest: u32) -> Result<(), Mismatch> {
    if plugin.major != ABI_MAJOR {
        return Err(Mismatch::Major {
            plugin: plugin.major,
            host: ABI_MAJOR,
        });
    }
    if plugin.needs_minor > plugin.built_minor {
        return Err(Mismatch::Contradiction {
            needs: plugin.needs_minor,
            built: plugin.built_minor,
        });
    }
    if plugin.needs_minor > host_minor {
        return Err(Mismatch::HostTooOld {
            needs: plugin.needs_minor,
            host: host_minor,
        });
    }
    if plugin.built_minor < oldest {
        return Err(Mismatch::PluginTooOld {
            built: plugin.built_minor,
            oldest,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(major: u32, built: u32, needs: u32) -> PluginVersion {
        PluginVersion {
            major,
            built_minor: built,
            needs_minor: needs,
        }
    }

    #[test]
    fn newer_plugin_loads_when_it_needs_little() {
        assert_eq!(negotiate(plugin(1, 7, 0), 2, 0), Ok(()));
        assert_eq!(
            negotiate(plugin(1, 7, 3), 2, 0),
            Err(Mismatch::HostTooOld { needs: 3, host: 2 })
        );
    }

    #[test]
    fn older_plugin_loads_down_to_the_oldest_supported() {
        assert_eq!(negotiate(plugin(1, 1, 1), 9, 1), Ok(()));
        assert_eq!(
            negotiate(plugin(1, 0, 0), 9, 1),
            Err(Mismatch::PluginTooOld {
                built: 0,
                oldest: 1
            })
        );
    }

    #[test]
    fn majors_must_match_and_the_message_says_who_is_old() {
        let newer = negotiate(plugin(2, 0, 0), 0, 0).unwrap_err().to_string();
        assert!(newer.ends_with("update mlxcel"), "{newer}");
        let older = negotiate(plugin(0, 0, 0), 0, 0).unwrap_err().to_string();
        assert!(older.ends_with("update the plugin"), "{older}");
    }

    #[test]
    fn a_plugin_cannot_need_more_than_it_was_built_at() {
        assert_eq!(
            negotiate(plugin(1, 0, 1), 5, 0),
            Err(Mismatch::Contradiction { needs: 1, built: 0 })
        );
    }
}
