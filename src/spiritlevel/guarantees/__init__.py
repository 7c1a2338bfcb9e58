"""What a flatness number buys: the guarantees that the papers derive their measures from, computed honestly."""
