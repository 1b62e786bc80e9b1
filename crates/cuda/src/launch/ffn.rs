//! The gated activation of the feed-forward.
