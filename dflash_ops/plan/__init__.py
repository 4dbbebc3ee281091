"""Works out what a launch sends, before anything is connected."""
